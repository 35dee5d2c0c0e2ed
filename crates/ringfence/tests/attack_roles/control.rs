//! Attacks on the control socket of a driver domain: connections that do not read, that send nothing, or that
//! come from no launcher, and disks that hang. In each test another guest must be served meanwhile. As `connect` the
//! program plays the guest's command that connects.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use ringfence_driver::proof;
use ringfence_driver::switchboard::{FromDriver, ToDriver};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::{Channel, ChannelError};

use ringfence_block::storage::testing::{Driver, lent_with};
use ringfence_block::storage::{Disk, Op};
use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};

use crate::require;
use crate::support::disks::{Background, image_file, listens, socket_of};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, eventually};

/// Tests of this module.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("control::launcher_that_does_not_read_is_disconnected", launcher_that_does_not_read),
    ("control::mute_connection_does_not_keep_the_driver_domain", mute_connection),
    ("control::connection_without_proof_is_refused", connection_without_proof),
    ("control::process_of_another_user_namespace_is_refused", another_user_namespace),
    ("control::lingering_descriptors_do_not_block_the_control_thread", lingering_descriptors),
    ("control::disk_that_hangs_does_not_hold_up_other_guests", disk_that_hangs),
    ("control::limits_of_the_first_launcher_do_not_hold_for_the_driver_domain", limits),
];

/// Connects to the control socket of a switch, and prints the answer.
pub(crate) fn connect(directory: &str, switch: &str) -> ExitCode {
    println!("{}", connect_from_elsewhere(Path::new(directory), switch));
    ExitCode::SUCCESS
}

/// Program of the victim, and of the guests that ask it.
const PYTHON: Need = Need::Program("python3", "python3");
/// Command of the victim.
const SERVER: [&str; 4] = ["python3", "-m", "http.server", "8000"];

/// Command that requests from the victim until it answers.
const CLIENT: &str = "
import time, urllib.request
while True:
    try:
        print('served', urllib.request.urlopen('http://victim:8000/', timeout=20).status)
        break
    except OSError:
        time.sleep(0.1)
";

fn channel(directory: &Path, switch: &str) -> Channel {
    let directory = RuntimeDir::open_at(directory.to_owned()).unwrap();
    Channel::from_fd(directory.connect(switch).unwrap().expect("the switch is there"))
}

/// Checks that a guest can join the switch, and that the victim is served.
fn assert_served(lab: &Lab, switch: &str) {
    let options = format!("--switch {switch}");
    let said = lab.run(&options, &["python3", "-c", CLIENT]).succeed(Duration::from_secs(60));
    assert!(said.contains("served"), "{said}");
}

/// Waits until the driver domain has closed the connection.
fn assert_hung_up(channel: &Channel) {
    let ended = eventually(MOMENT, || {
        matches!(channel.try_receive::<FromDriver>(), Err(ChannelError::Closed))
    });
    assert!(ended, "the connection is still there");
}

fn launcher_that_does_not_read() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let victim = lab.run("--switch s --name victim", &SERVER);
    victim.wait_up();
    let greedy = channel(&lab.runtime_dir(), "s");
    proof::introduce(&greedy).unwrap();
    // The driver domain has hung up or is blocked, so it takes no more messages.
    for _ in 0..2000 {
        if greedy.send_now(&ToDriver::Stats, &[]).is_err() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    assert_served(&lab, "s");
    assert_hung_up(&greedy);
    assert_eq!(victim.end().status, Some(143));
    lab.assert_no_switch();
}

fn mute_connection() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let victim = lab.run("--switch s --name victim", &SERVER);
    victim.wait_up();
    let mute = channel(&lab.runtime_dir(), "s");
    assert_eq!(victim.end().status, Some(143));
    let socket = lab.runtime_dir().join("s.sock");
    let gone = eventually(MOMENT, || !socket.exists());
    assert!(gone, "a connection that says nothing keeps the driver domain");
    drop(mute);
}

fn connection_without_proof() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let victim = lab.run("--switch s --name victim", &SERVER);
    victim.wait_up();
    let stranger = channel(&lab.runtime_dir(), "s");
    stranger.send(&ToDriver::Stats, &[]).unwrap();
    let (answer, _) = stranger.receive_within::<FromDriver>(MOMENT).unwrap();
    assert!(matches!(answer, FromDriver::Refused(_)), "{answer:?}");
    assert_hung_up(&stranger);
    // A connection that sends nothing is closed too.
    assert_hung_up(&channel(&lab.runtime_dir(), "s"));
    assert_served(&lab, "s");
    victim.end();
}

/// Returns the driver domain's answer to a process that behaves as a launcher does.
fn connect_from_elsewhere(directory: &Path, switch: &str) -> String {
    let channel = channel(directory, switch);
    proof::introduce(&channel).unwrap();
    // The driver domain may have closed the connection already.
    let _ = channel.send(&ToDriver::Stats, &[]);
    match channel.receive_within::<FromDriver>(MOMENT) {
        Ok((FromDriver::Refused(why), _)) => format!("refused: {why}"),
        Ok((answer, _)) => format!("admitted: {answer:?}"),
        Err(error) => format!("failed: {error}"),
    }
}

fn another_user_namespace() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let victim = lab.run("--switch s --name victim", &SERVER);
    victim.wait_up();
    let this = std::env::current_exe().unwrap();
    let directory = lab.runtime_dir();
    let connect = [this.to_str().unwrap(), "connect", directory.to_str().unwrap(), "s"];
    let said = lab.spawn(&connect).succeed(MOMENT);
    assert!(said.starts_with("admitted: Stats"), "the same from the launcher's namespace: {said}");
    let elsewhere = ["unshare", "--user", "--map-current-user"];
    let words: Vec<&str> = elsewhere.into_iter().chain(connect).collect();
    let said = lab.spawn(&words).succeed(MOMENT);
    assert!(said.starts_with("refused: ") && said.contains("user namespace"), "{said}");
    victim.end();
}

/// Returns a connection whose close blocks, and the end that does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (reader, _) = listener.accept().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&writer, Some(Duration::from_secs(3600))).unwrap();
    (writer.into(), reader)
}

fn lingering_descriptors() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let victim = lab.run("--switch s --name victim", &SERVER);
    victim.wait_up();
    let mut readers = Vec::new();
    for (is_introduced, count) in [(false, 1), (false, 2), (false, 64), (true, 1), (true, 64)] {
        let attacker = channel(&lab.runtime_dir(), "s");
        if is_introduced {
            proof::introduce(&attacker).unwrap();
        }
        let (writer, reader) = lingering();
        let fds = vec![writer.as_fd(); count];
        attacker.send(&ToDriver::Stats, &fds).unwrap();
        let leg = ToDriver::HostLeg { name: "x".to_owned(), offloads: 0, mtu: 1500 };
        // The send fails if the driver domain has hung up already.
        let _ = attacker.send_now(&leg, &fds);
        // The driver domain holds the last references.
        drop(fds);
        drop(writer);
        readers.push(reader);
        drop(attacker);
        assert_served(&lab, "s");
    }
    victim.end();
    lab.assert_no_switch();
}

fn disk_that_hangs() {
    require!(Need::Guests, PYTHON, Need::Program("nbdkit", "nbdkit"));
    let lab = Lab::new();
    let victim = lab.run("--switch s --name victim", &SERVER);
    victim.wait_up();
    let (image, socket) = (image_file(&lab, 4).display().to_string(), lab.file("nbdkit.sock"));
    let path = socket.display().to_string();
    let words = ["nbdkit", "-f", "-U", &path, "file", &image];
    let server = Background::start(&words, || listens(&socket));
    // The time limit of requests is beyond the end of the test.
    let disk = format!("--switch s --disk nbd+unix:///?socket={path},timeout=600,stall=600");
    let hung = lab.run(&disk, &["sleep", "300"]);
    hung.wait_up();
    let address = NbdAddress::Unix { path: socket_of(&lab, &hung), name: String::new(), tls: None };
    let options = NbdOptions { journal: 0, ..NbdOptions::default() };
    let mut opened = None;
    eventually(MOMENT, || {
        opened = NbdDisk::open(&address, &options).ok();
        opened.is_some()
    });
    let mut client = Driver::new(opened.expect("the disk can be opened").queue(4).unwrap());
    client.write(0, &[1; 4096]).unwrap();
    server.stop();
    let memory = lent_with(&[2; 4096]);
    client.submit(Op::Write { fua: false }, 4096, 4096, vec![memory.into()]);
    client.queue().kick();
    // The request needs time to reach the stopped server.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(hung.end().status, Some(143));
    for _ in 0..3 {
        assert_served(&lab, "s");
    }
    assert_eq!(victim.end().status, Some(143));
    let socket = lab.runtime_dir().join("s.sock");
    assert!(eventually(MOMENT, || !socket.exists()), "the driver domain waits for the disk");
    drop((client, server));
}

fn limits() {
    require!(Need::Guests);
    let lab = Lab::new();
    let program = lab.program();
    let script = format!(
        "ulimit -S -t 1000; \
         exec {program} run --uplink none --switch s -- sleep 300"
    );
    let first = lab.spawn(&["bash", "-c", &script]);
    first.wait_up();
    let pid = first.inner("driver").pid;
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max cpu time")).unwrap();
    let [.., soft, hard, _] = line.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    assert_eq!(soft, hard, "{line}");
    first.end();
}
