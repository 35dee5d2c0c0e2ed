//! Guest from Rust: starts one, reads a line of its command and stops it. The argument is the program `ringfence`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use ringfence::Guest;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let program = std::env::args().nth(1).unwrap_or_else(|| "ringfence".to_owned());
    print!("{}", greet(&program)?);
    Ok(())
}

/// Returns the guest's name, its address, the line of its command and its end.
pub(crate) fn greet(program: &str) -> Result<String, Box<dyn std::error::Error>> {
    let mut guest = Guest::builder(["sh", "-c", "echo hello from $(hostname); exec sleep 600"])
        .program(program)
        .name("first")
        .switch("example")
        .uplink("none")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(guest.child().stdout.take().ok_or("no pipe")?).read_line(&mut line)?;
    let (name, addresses) = (guest.name().to_owned(), guest.addresses().join(" "));
    Ok(format!("{name} has {addresses}\n{line}{}\n", guest.stop()?))
}
