//! Switches of guests: one for each guest, or one for all guests that name it; and disks of guests without a switch.

use crate::require;
use crate::support::disks::{URI, image_file};
use crate::support::needs::Need;
use crate::support::processes::Process;
use crate::support::{Lab, MOMENT, Running, eventually, sha256, write_noise};

/// Starts `ringfence run` with a switch of its own, as it is without options.
fn alone(lab: &Lab, options: &[&str], command: &[&str]) -> Running {
    let start = [lab.program(), "run", "--uplink", "none"];
    let words: Vec<&str> =
        start.iter().chain(options).chain(&["--"]).chain(command).copied().collect();
    lab.spawn(&words)
}

fn listed(lab: &Lab) -> serde_json::Value {
    let said = lab.spawn(&[lab.program(), "ps", "--json"]).succeed(MOMENT);
    serde_json::from_str(&said).unwrap()
}

const SERVER: &str = "import socket
server = socket.socket()
server.bind(('0.0.0.0', 7000))
server.listen()
print('ready', flush=True)
while True:
    server.accept()[0].sendall(b'hello')";

/// Program that looks up the name `web` and connects to its first argument.
const CLIENT: &str = "import socket, sys
try:
    print('name', socket.gethostbyname('web'))
except OSError:
    print('no name')
try:
    print(socket.create_connection((sys.argv[1], 7000), 20).recv(5).decode())
except OSError:
    print('no connection')";

#[test]
fn guests_without_a_common_switch_do_not_reach_each_other() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    let address = ["--address", "10.9.0.1/24"];
    let server =
        alone(&lab, &[&["--name", "web"], &address[..]].concat(), &["python3", "-c", SERVER]);
    server.wait_for_output("ready");
    let client = ["python3", "-c", CLIENT, "10.9.0.1"];
    // The address of the client is in the same network.
    let other = ["--address", "10.9.0.2/24"];
    assert_eq!(alone(&lab, &other, &client).succeed(MOMENT), "no name\nno connection\n");
    let shared = lab.run("--address 10.9.0.2/24 --switch default", &client).succeed(MOMENT);
    assert_eq!(shared, "no name\nno connection\n");
    server.end();
    lab.assert_no_switch();
}

#[test]
fn guests_that_name_a_switch_reach_each_other() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for switch in ["lab", "default"] {
        let lab = Lab::new();
        let options = format!("--switch {switch} --name web --address 10.9.0.1/24");
        let server = lab.run(&options, &["python3", "-c", SERVER]);
        server.wait_for_output("ready");
        let options = format!("--switch {switch} --address 10.9.0.2/24");
        let said = lab.run(&options, &["python3", "-c", CLIENT, "10.9.0.1"]).succeed(MOMENT);
        assert_eq!(said, "name 10.9.0.1\nhello\n");
        server.end();
    }
}

#[test]
fn first_lines_and_ps_name_the_switch_of_a_guest() {
    require!(Need::Guests);
    let lab = Lab::new();
    let first = alone(&lab, &[], &["sleep", "1000"]);
    let second = alone(&lab, &[], &["sleep", "1000"]);
    let shared = lab.run("--switch lab", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab).as_array().unwrap().len() == 3));
    let guests = listed(&lab);
    for guest in [&first, &second] {
        let pid = guest.pid().as_raw_nonzero();
        let line = format!("guest-{pid} is on switch `private-{pid}`, alone (see --switch)");
        guest.wait_for_error(&line);
        let listed = guests.as_array().unwrap().iter().find(|of| of["pid"] == pid.get()).unwrap();
        assert_eq!(listed["switch"], format!("private-{pid}"));
        assert_eq!(listed["name"], format!("guest-{pid}"));
    }
    let line = "is on switch `lab`, with all guests that name it";
    shared.wait_for_error(line);
    // A private switch ends with its guest, and nobody can join it.
    let own = lab.runtime_dir().join(format!("private-{}.sock", first.pid().as_raw_nonzero()));
    assert!(own.exists());
    let joining = format!("--switch private-{}", first.pid().as_raw_nonzero());
    let refused = lab.run(&joining, &["true"]).finish(MOMENT);
    assert_eq!(refused.status, Some(125));
    assert!(refused.stderr.contains("one guest has for itself"), "{}", refused.stderr);
    first.end();
    assert!(eventually(MOMENT, || !own.exists()));
    second.end();
    shared.end();
    lab.assert_no_switch();
}

#[test]
fn disk_of_a_guest_without_switch_is_stored_and_read_back() {
    require!(Need::Guests, Need::Program("nbdcopy", "libnbd-bin"));
    for mode in ["persistent", "window"] {
        let lab = Lab::new();
        let disk = image_file(&lab, 8);
        let (content, back) = (lab.file("in"), lab.file("out"));
        write_noise(&content, 8);
        let script = format!(
            "ls /sys/class/net; nbdcopy --flush {} {URI}0; nbdcopy {URI}0 {}",
            content.display(),
            back.display()
        );
        let options = format!("--switch none --disk {},mode={mode}", disk.display());
        assert_eq!(lab.script(&options, &script).succeed(MOMENT), "lo\n");
        assert_eq!(sha256(&disk), sha256(&content), "{mode}");
        assert_eq!(sha256(&back), sha256(&content), "{mode}");
        lab.assert_no_switch();
    }
}

#[test]
fn end_of_the_driver_domain_of_disks_ends_a_guest_without_switch() {
    require!(Need::Guests);
    let lab = Lab::new();
    let options = format!("--switch none --disk {}", image_file(&lab, 1).display());
    let guest = lab.script(&options, "touch up; sleep 1000");
    assert!(eventually(MOMENT, || lab.file("up").exists()));
    assert_eq!(listed(&lab)[0]["switch"], serde_json::Value::Null);
    let is_driver = |process: &Process| process.is_role("driver");
    guest.processes().into_iter().find(is_driver).unwrap().signal(rustix::process::Signal::KILL);
    let finished = guest.finish(MOMENT);
    assert_eq!(finished.status, Some(125));
    let why = "the driver domain of its disks was killed by signal 9 (SIGKILL)";
    assert!(finished.stderr.contains(why), "{}", finished.stderr);
    lab.assert_no_switch();
}
