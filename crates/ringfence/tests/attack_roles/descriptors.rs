//! A compromised frontend sends descriptors whose close blocks, over each of its sockets: event channels, the
//! store, the hub and its launcher. Other guests of the switch must be served meanwhile.
//!
//! The frontends of guests that the program starts attack from inside their sandbox.

use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use ringfence_sys::descriptors::testing::{kernel_refuses, send_raw};
use ringfence_testkit::attack;
use rustix::net::SocketType;

use crate::require;
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, eventually};

/// Minimum number of stream sockets of a connected frontend: two event channels and the store.
const STREAMS: usize = 3;

/// Tests of this module.
pub(crate) const TESTS: &[(&str, fn())] = &[(
    "descriptors::lingering_descriptors_of_a_frontend_do_not_hold_up_other_guests",
    other_guests_are_served,
)];

/// Plays a frontend that was taken over.
pub(crate) fn main_of_frontend() -> ExitCode {
    take_lingering_descriptor();
    ringfence_frontend::process::main_taken_over(attack_from_inside).into()
}

/// Keeps standard input, the end of a connection that does not read. The process ends with the frontend.
pub(crate) fn hold() -> ExitCode {
    std::thread::sleep(Duration::from_secs(3600));
    ExitCode::SUCCESS
}

/// Makes standard output a TCP socket whose close blocks for an hour, because the sandbox keeps that one open.
/// A process of its own holds the end that does not read.
fn take_lingering_descriptor() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (reader, _) = listener.accept().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&writer, Some(Duration::from_secs(3600))).unwrap();
    let this = std::env::current_exe().unwrap();
    let holder = Command::new(this)
        .arg("hold")
        .stdin(Stdio::from(OwnedFd::from(reader)))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // The process is killed with the namespace.
    drop(holder);
    rustix::stdio::dup2_stdout(&writer).unwrap();
}

fn say(line: &str) {
    // A lost line makes the test fail.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn attack_from_inside() {
    let streams =
        || attack::unix_sockets().iter().filter(|(_, kind)| *kind == SocketType::STREAM).count();
    eventually(MOMENT, || streams() >= STREAMS);
    // The device needs time to connect.
    std::thread::sleep(Duration::from_secs(2));
    let writer = rustix::stdio::stdout();
    let (mut sent, mut refused) = (0, 0);
    let mut sockets = attack::unix_sockets();
    // A message to the hub or the launcher ends this frontend, so these come last.
    sockets.sort_by_key(|(_, kind)| *kind != SocketType::STREAM);
    for (socket, kind) in sockets {
        if kind != SocketType::STREAM {
            say(&format!("[streams: {sent} sent, {refused} refused]"));
        }
        for count in [1, 4] {
            match send_raw(&socket, &[1; 32], &vec![writer.as_fd(); count]) {
                Ok(()) => sent += 1,
                Err(error) if error.raw_os_error() == Some(1) => refused += 1,
                Err(_) => {}
            }
        }
    }
    say("[done: everything was sent]");
}

fn other_guests_are_served() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::of(std::env::current_exe().unwrap());
    // Correct frontends on the switch of the same runtime directory.
    let program = env!("CARGO_BIN_EXE_ringfence");
    let honest = |name: &str, script: &str| {
        let options = ["run", "--uplink", "none", "--switch", "s", "--name", name, "--"];
        let words: Vec<&str> =
            [program].into_iter().chain(options).chain(["sh", "-ec", script]).collect();
        lab.spawn(&words)
    };
    let victim = honest("victim", "exec python3 -m http.server 8000");
    victim.wait_up();
    for round in 0..2 {
        let attacker = lab.run("-v --switch s", &["sleep", "300"]);
        attacker.wait_for_error("[streams: ");
        if kernel_refuses() {
            let said = attacker.stderr.text();
            assert!(said.contains("[streams: 0 sent, "), "{said}");
            assert!(!said.contains("[streams: 0 sent, 0 refused"), "{said}");
        }
        attacker.wait_for_error("[done: ");
        // The frontend's copies are closed with it. Each receiver that kept one has the last reference then.
        attacker.end();
        let ask = "until python3 -c \"import urllib.request as r; r.urlopen('http://victim:8000/', \
                   timeout=20)\"; do sleep 0.1; done; echo served";
        let said = honest(&format!("n{round}"), ask).succeed(Duration::from_secs(60));
        assert!(said.contains("served"));
    }
    assert_eq!(victim.end().status, Some(143));
    lab.assert_no_switch();
}
