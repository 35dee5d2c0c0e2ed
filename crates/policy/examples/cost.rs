//! Cost of verdicts: a gate with 1,000 rules and 10,000 pins beside one with a single rule. Build it with `--release`.

use core::error::Error;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use std::hint::black_box;
use std::time::Instant;

use ringfence_policy::gate::QueryEnds;
use ringfence_policy::{Action, Gate, Policy, PolicySource, Protocol, RuleSource, first};

const ROUNDS: u32 = 200_000;

/// Creates a gate with rules for `n0.example` and so on, and an answer for each name with `each` addresses.
fn gate(rules: u32, each: u32) -> Result<Gate, Box<dyn Error>> {
    let rule = |number| RuleSource {
        action: Action::Allow,
        text: format!("n{number}.example:443/tcp"),
        origin: "example".to_owned(),
    };
    let source = PolicySource { rules: (0..rules).map(rule).collect(), ..PolicySource::default() };
    let mut gate = Gate::new(Policy::new(source)?);
    let (guest, server) = (([10, 0, 0, 2], 4000).into(), ([10, 0, 0, 1], 53).into());
    let ends = QueryEnds { guest, server, over: Protocol::Udp };
    for number in 0..rules {
        let name = format!("n{number}");
        let mut question = vec![u8::try_from(name.len())?];
        question.extend_from_slice(name.as_bytes());
        question.extend_from_slice(b"\x07example\0\0\x01\0\x01");
        let query = [b"\0\x07\x01\0\0\x01\0\0\0\0\0\0", &question[..]].concat();
        gate.query(ends, &query, Duration::ZERO);
        let mut answer = [b"\0\x07\x81\x80\0\x01\0", &[u8::try_from(each)?][..]].concat();
        answer.extend_from_slice(b"\0\0\0\0");
        answer.extend_from_slice(&question);
        for index in 0..each {
            answer.extend_from_slice(b"\xc0\x0c\0\x01\0\x01\0\0\x0e\x10\0\x04");
            answer.extend_from_slice(&address(number * each + index).octets());
        }
        gate.answer(ends, Protocol::Udp, &mut answer, Duration::ZERO);
    }
    Ok(gate)
}

/// Returns a public address for each number.
fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0800_0000 + number)
}

fn main() -> Result<(), Box<dyn Error>> {
    for (rules, each) in [(1, 1), (1000, 10)] {
        let gate = gate(rules, each)?;
        let pins = gate.pins().len();
        let begin = Instant::now();
        let mut allowed = 0;
        for round in 0..ROUNDS {
            let ip = IpAddr::from(address(round % (rules * each)));
            let to = SocketAddr::new(ip, 443);
            let decision = gate.connect(black_box(to), Protocol::Tcp, Duration::ZERO);
            allowed += u32::from(decision.verdict.is_allowed());
        }
        let connect = begin.elapsed() / ROUNDS;
        let request = b"GET / HTTP/1.1\r\nHost: n0.example\r\nUser-Agent: x\r\nAccept: */*\r\n\r\n";
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            black_box(first::inspect(black_box(request), false));
        }
        let inspect = begin.elapsed() / ROUNDS;
        println!(
            "{rules} rules, {pins} pins: connection {connect:?} ({allowed} allowed), request {inspect:?}"
        );
    }
    Ok(())
}
