//! Verdicts on a query, a connection and a hello.

use core::error::Error;
use core::net::SocketAddr;
use core::time::Duration;

use ringfence_policy::gate::{QueryEnds, QueryFate};
use ringfence_policy::{Gate, Policy, Protocol, file, first};

const POLICY: &str = "
allow = ['example.org:80,443/tcp', '203.0.113.0/24:22']
deny = ['private.example.org']
";

/// Query for `example.org`, type A, and its answer 198.51.100.7.
const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x07example\x03org\0\0\x01\0\x01";
const ANSWER: &[u8] = b"\x12\x34\x81\x80\0\x01\0\x01\0\0\0\0\x07example\x03org\0\0\x01\0\x01\
    \xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\xc6\x33\x64\x07";

fn main() -> Result<(), Box<dyn Error>> {
    let mut gate = Gate::new(Policy::new(file::parse("example.toml", POLICY)?)?);
    let (guest, server) = ("10.0.0.2:40000".parse()?, "10.0.0.1:53".parse()?);
    let ends = QueryEnds { guest, server, over: Protocol::Udp };
    let now = Duration::from_secs(1);

    let resolution = gate.query(ends, QUERY, now);
    println!("query: {}", gate.policy().describe(resolution.verdict.cause));
    if let QueryFate::Forward(bytes) = resolution.fate {
        println!("  {} bytes go to the name server", bytes.len());
    }
    gate.answer(ends, Protocol::Udp, &mut ANSWER.to_vec(), now);

    for to in ["198.51.100.7:80", "198.51.100.7:25", "198.51.100.8:443", "203.0.113.9:22"] {
        let to: SocketAddr = to.parse()?;
        let decision = gate.connect(to, Protocol::Tcp, now);
        let cause = gate.policy().describe(decision.verdict.cause);
        println!("{to}: {:?}, {cause}", decision.verdict.action);
    }

    let to: SocketAddr = "198.51.100.7:80".parse()?;
    let allowed = gate.connect(to, Protocol::Tcp, now);
    let request = b"GET / HTTP/1.1\r\nHost: private.example.org\r\n\r\n";
    if let Some(shown) = first::inspect(request, false) {
        let decision = gate.check(to, Protocol::Tcp, &allowed, &shown, now);
        println!("request: {:?}", decision.verdict);
    }
    Ok(())
}
