//! Data that a command sent just before it ended. The frontend and the uplink carry it before they end, too.
//!
//! A process that is stopped while the command ends finds the data only afterwards, so no test depends on a race.

use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::needs::Need;
use crate::support::processes::Process;
use crate::support::world::{FAR_V4, Families, World};
use crate::support::{Lab, MOMENT, Running, eventually};

/// Less than the time after which a launcher waits no longer, 11 s.
const BEFORE_LIMIT: Duration = Duration::from_secs(9);

const PYTHON: Need = Need::Program("python3", "python3");

/// Answers the first datagram to port 7000 of its argument, and prints the second one.
const RECEIVE: &str = "
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7000))
print('listening', flush=True)
_, sender = s.recvfrom(100)
s.sendto(b'known', sender)
print(s.recv(100).decode(), flush=True)
";

/// Sends a datagram to port 7000 of its argument, so that the neighbours know each other; waits for the file `go`, and sends
/// the last one.
const SEND: &str = "
import os, socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(20)
s.connect((sys.argv[1], 7000))
s.send(b'first')
assert s.recv(100) == b'known'
print('ready', flush=True)
while not os.path.exists('go'):
    time.sleep(0.01)
s.send(b'last words')
";

/// Bytes of an upload: more than the kernel of a guest and that of its host keep for a peer that does not read.
const UPLOAD: usize = 32 << 20;

/// Reads one connection slowly, and prints the number of its bytes.
const READ_SLOWLY: &str = "
import socket, time
s = socket.create_server(('', 7000))
print('listening', flush=True)
c, _ = s.accept()
size = 0
while more := c.recv(1 << 18):
    size += len(more)
    time.sleep(0.01)
print(size, 'bytes', flush=True)
";

/// Accepts one connection and reads nothing.
const READ_NOTHING: &str = "
import socket, time
s = socket.create_server(('', 7000))
print('listening', flush=True)
c, _ = s.accept()
time.sleep(1000)
";

/// Sends as many bytes as the second argument says to port 7000 of the first one, and ends when the kernel has them.
const UPLOADING: &str = "
import socket, sys
socket.create_connection((sys.argv[1], 7000)).sendall(bytes(int(sys.argv[2])))
";

/// Ends the command of a guest while the process of this role is stopped, and returns that process.
fn end_while_stopped(lab: &Lab, sender: &Running, role: &str) -> Process {
    sender.wait_for_output("ready");
    let stopped = sender.inner(role);
    let init = sender.inner("guest-init");
    stopped.signal(Signal::STOP);
    std::fs::write(lab.file("go"), "").unwrap();
    let has_ended = eventually(MOMENT, || !init.is_alive());
    assert!(has_ended, "the command still runs");
    stopped
}

#[test]
fn last_datagram_of_a_command_arrives_at_the_host_s_network() {
    let Some(world) = World::new(Families::V4) else { return };
    std::fs::write(world.file("send.py"), SEND).unwrap();
    let receiver = world.outside(&["python3", "-c", RECEIVE, FAR_V4]);
    receiver.wait_for_output("listening");
    // Each queue of the interface has a thread, and the packet is in one of them.
    let sender = world.lone_guest("--queues 2", &format!("python3 send.py {FAR_V4}"));
    end_while_stopped(&world.lab, &sender, "uplink").signal(Signal::CONT);
    sender.succeed(MOMENT);
    assert!(receiver.succeed(MOMENT).contains("last words"));
}

#[test]
fn last_datagram_of_a_command_arrives_at_a_guest_of_its_switch() {
    require!(Need::Guests, PYTHON);
    let lab = Lab::new();
    let receiver = lab.run("--switch s --name a", &["python3", "-c", RECEIVE, ""]);
    receiver.wait_for_output("listening");
    let sender = lab.run("--switch s", &["python3", "-c", SEND, "a"]);
    end_while_stopped(&lab, &sender, "frontend").signal(Signal::CONT);
    sender.succeed(MOMENT);
    assert!(receiver.succeed(MOMENT).contains("last words"));
}

#[test]
fn upload_to_a_slow_reader_is_whole_after_the_command_ended() {
    let Some(world) = World::new(Families::V4) else { return };
    std::fs::write(world.file("upload.py"), UPLOADING).unwrap();
    let upload = format!("python3 upload.py {FAR_V4} {UPLOAD}");
    let program = world.lab.program().to_owned();
    let pasta = [&program, "pasta", "--config-net", "--", "sh", "-ec", &upload];
    for is_pasta in [false, true] {
        let reader = world.outside(&["python3", "-c", READ_SLOWLY]);
        reader.wait_for_output("listening");
        let sender = if is_pasta { world.host(&pasta) } else { world.lone_guest("", &upload) };
        sender.succeed(MOMENT);
        assert_eq!(reader.succeed(MOMENT), format!("listening\n{UPLOAD} bytes\n"));
    }
}

#[test]
fn guest_with_data_for_a_peer_that_does_not_read_ends_with_its_command() {
    let Some(world) = World::new(Families::V4) else { return };
    std::fs::write(world.file("upload.py"), UPLOADING).unwrap();
    let reader = world.outside(&["python3", "-c", READ_NOTHING]);
    reader.wait_for_output("listening");
    // The kernels take a megabyte without a reader, but the reader's kernel alone does not.
    let sender = world.lone_guest("", &format!("python3 upload.py {FAR_V4} {}", 1 << 20));
    sender.succeed(MOMENT);
    reader.end();
}

#[test]
fn signal_ends_the_wait_for_a_process_that_does_not_answer() {
    require!(Need::Guests);
    let lab = Lab::new();
    let wait = "echo ready; while [ ! -e go ]; do sleep 0.01; done";
    let sender = lab.script("--switch s", wait);
    end_while_stopped(&lab, &sender, "frontend");
    kill_process(sender.pid(), Signal::TERM).unwrap();
    let ended = sender.finish(BEFORE_LIMIT);
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
}
