//! Disks of guests that do nothing else. The test uses a disk from outside, as its user may.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};

use super::{Lab, MOMENT, Running, eventually};

/// Address of a guest's disk in a script, without the number.
pub const URI: &str = "nbd+unix:///?socket=$RINGFENCE_DISK";

/// Creates a file of zeros.
pub fn image_file(lab: &Lab, mebibytes: u64) -> PathBuf {
    let path = lab.file("disk.img");
    fs::File::create(&path).unwrap().set_len(mebibytes << 20).unwrap();
    path
}

/// Returns the number of rounds: `few`, or `RINGFENCE_SOAK_ROUNDS` in a soak.
pub fn rounds(few: u64) -> u64 {
    let wanted = std::env::var("RINGFENCE_SOAK_ROUNDS").ok();
    wanted.map_or(few, |number| number.parse().unwrap())
}

/// Returns a path to the socket of a guest's first disk. The socket has a path in the guest's view alone, so it is reached
/// through the root directory of the guest's command.
pub fn socket_of(lab: &Lab, guest: &Running) -> PathBuf {
    let below = lab.runtime_dir().join("disk0");
    let below = below.strip_prefix("/").unwrap();
    let find = || {
        let processes = guest.processes().into_iter();
        let mut paths = processes.map(|process| {
            PathBuf::from(format!("/proc/{}/root", process.pid.as_raw_nonzero())).join(below)
        });
        paths.find(|path| path.exists())
    };
    assert!(eventually(MOMENT, || find().is_some()), "the guest has no disk");
    find().expect("the disk's socket is gone again")
}

/// Starts a guest that does nothing, and opens its disk. A request fails after [`MOMENT`].
pub fn served(lab: &Lab, disk: &str) -> (Running, NbdDisk) {
    served_within(lab, disk, MOMENT)
}

/// Starts a guest as [`served`] does, with another time limit for requests.
pub fn served_within(lab: &Lab, disk: &str, give_up: Duration) -> (Running, NbdDisk) {
    let guest = lab.run(&format!("--disk {disk}"), &["sleep", "300"]);
    guest.wait_up();
    let path = socket_of(lab, &guest);
    let address = NbdAddress::Unix { path, name: String::new(), tls: None };
    let options = NbdOptions { give_up, journal: 0, ..NbdOptions::default() };
    let mut opened = None;
    eventually(MOMENT, || {
        opened = NbdDisk::open(&address, &options).ok();
        opened.is_some()
    });
    (guest, opened.expect("the disk can be opened"))
}

/// Program in the background, which is killed when this is dropped.
pub struct Background(pub Child);

impl Background {
    /// Starts the program, and waits until `is_there` returns `true`.
    pub fn start(words: &[&str], is_there: impl Fn() -> bool) -> Background {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = Background(command.spawn().unwrap_or_else(|e| panic!("{words:?}: {e}")));
        assert!(eventually(MOMENT, is_there), "{words:?} does not come up");
        started
    }

    /// Returns the process id.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.0)
    }

    /// Stops every thread of the program. Waits until all have stopped, because a thread may run until then.
    pub fn stop(&self) {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::STOP).unwrap();
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        let tasks = format!("/proc/{}/task", self.pid());
        let stopped = || std::fs::read_dir(&tasks).unwrap().all(is_stopped);
        assert!(eventually(MOMENT, stopped), "it is not stopped");
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns `true` if a process listens on the Unix socket.
pub fn listens(path: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(path).is_ok()
}

/// Returns `true` if a process of this network namespace listens on the Unix socket. Makes no connection, for a server that
/// ends after its first client.
pub fn is_listening(path: &Path) -> bool {
    /// Flag of a socket that listens.
    const ACCEPTS: &str = "00010000";
    // Abstract sockets of other programs may have any bytes as their names.
    let sockets = fs::read("/proc/net/unix").unwrap();
    let sockets = String::from_utf8_lossy(&sockets);
    let path = path.to_str().unwrap();
    // Number, references, protocol, flags, type, state, inode, path.
    let is_it = |words: &[&str]| words.get(3) == Some(&ACCEPTS) && words.last() == Some(&path);
    sockets.lines().any(|line| is_it(&line.split_whitespace().collect::<Vec<_>>()))
}

/// Returns `true` if an NBD server greets on the Unix socket. `qemu-nbd` listens before it locks its image, and greets
/// afterwards.
pub fn greets(path: &Path) -> bool {
    let greeting = || -> std::io::Result<[u8; 8]> {
        let mut stream = std::os::unix::net::UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        let mut magic = [0; 8];
        stream.read_exact(&mut magic)?;
        Ok(magic)
    };
    greeting().is_ok_and(|magic| &magic == b"NBDMAGIC")
}

/// Runs a program to its end. Returns its status and its output.
pub fn output_of(words: &[&str]) -> (Option<i32>, String) {
    let output = Command::new("timeout").arg("120").args(words).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// Runs a program that must succeed. Returns its output.
pub fn succeed(words: &[&str]) -> String {
    let (status, text) = output_of(words);
    assert_eq!(status, Some(0), "{words:?}: {text}");
    text
}

/// Returns the reason for which there can be no loop devices.
pub fn loop_missing() -> Option<String> {
    let control = fs::File::options().read(true).write(true).open("/dev/loop-control");
    let free = control.is_ok() && output_of(&["losetup", "-f"]).0 == Some(0);
    (!free).then(|| "loop devices may not be used here".to_owned())
}
