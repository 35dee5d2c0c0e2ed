//! Guests that a Rust program starts by the library.

#[allow(dead_code, reason = "the test calls the example's function instead of its main")]
#[path = "../../examples/guest.rs"]
mod example;

use std::time::Duration;

use crate::require;
use crate::support::Lab;
use crate::support::needs::Need;
use ringfence::Guest;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringfence");
/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(90);

/// Runs one of the functions below in a process with a runtime directory of the test's own.
fn in_a_lab(function: &str) -> String {
    let lab = Lab::new();
    let own = std::env::current_exe().unwrap();
    let words = [own.to_str().unwrap(), "--ignored", "--exact", function, "--nocapture"];
    lab.spawn(&words).succeed(LONG)
}

#[test]
fn example_starts_a_guest_and_stops_it() {
    require!(Need::Guests);
    let output = in_a_lab("library::run_the_example");
    assert!(output.contains("first has 10."), "{output}");
    assert!(output.contains("hello from first\n"), "{output}");
    assert!(output.contains("exit status: 143"), "{output}");
}

#[test]
#[ignore = "example_starts_a_guest_and_stops_it runs it in a process of its own"]
fn run_the_example() {
    print!("{}", example::greet(PROGRAM).unwrap());
}

#[test]
fn exit_status_of_the_command_is_returned() {
    require!(Need::Guests);
    let output = in_a_lab("library::wait_for_guests");
    assert!(output.contains("Some(7) Some(127)"), "{output}");
}

#[test]
#[ignore = "exit_status_of_the_command_is_returned runs it in a process of its own"]
fn wait_for_guests() {
    let status = |command: &[&str]| {
        let builder = Guest::builder(command).program(PROGRAM).switch("none").uplink("none");
        builder.spawn().unwrap().wait().unwrap().code()
    };
    println!("{:?} {:?}", status(&["sh", "-c", "exit 7"]), status(&["/nonexistent/program"]));
}
