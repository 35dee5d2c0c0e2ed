//! Common parts of the end-to-end tests: a runtime directory for each test, guests that end with the test,
//! process trees, and reactions to missing programs.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

pub mod cgroups;
pub mod disks;
pub mod egress;
pub mod harness;
pub mod lab;
pub mod machine;
pub mod mirror;
pub mod needs;
pub mod processes;
pub mod screen;
pub mod users;
pub mod world;

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringfence_driver::switchboard::{DriverStats, FromDriver, ToDriver};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::Channel;
use rustix::process::{Pid, Signal};

use processes::{Process, descendants};

/// Limit for a step that takes a moment on an idle machine, and up to half a minute beside a load of 18.
pub const MOMENT: Duration = Duration::from_secs(60);
/// Limit for the disappearance of processes and files. It takes tens of milliseconds on an idle machine.
pub const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Program that starts a command whose standard error is a pipe that is full, and waits until a file of a pattern exists.
/// Arguments: the pattern, then the command.
pub const WITH_FULL_PIPE: &str = r#"
import fcntl, glob, os, subprocess, sys, time
output, pipe = os.pipe()
fcntl.fcntl(pipe, 1031, 4096)  # F_SETPIPE_SZ
os.write(pipe, b"." * 4096)
launcher = subprocess.Popen(sys.argv[2:], stderr=pipe)
while not glob.glob(sys.argv[1]):
    time.sleep(0.01)
print("found", flush=True)
os.read(output, 4096)
print(os.read(output, 4096).decode(), flush=True)
launcher.terminate()
launcher.wait()
"#;

/// Runtime directory of a test, with its switches and with files that guests share.
///
/// Dropping it ends everything that the test started in it. After a failure it prints all output.
pub struct Lab {
    directory: tempfile::TempDir,
    program: PathBuf,
    said: Mutex<Vec<(String, Said)>>,
}

/// Output of a process that has been read so far.
#[derive(Clone, Default)]
pub struct Said(Arc<Mutex<Vec<u8>>>);

impl Said {
    /// Returns the output as text.
    pub fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Reads `from` to its end, on a thread of its own.
    pub fn listen(&self, mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<()> {
        let said = self.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                let mut bytes = said.0.lock().unwrap_or_else(PoisonError::into_inner);
                bytes.extend_from_slice(&buffer[..length]);
            }
        })
    }
}

impl Lab {
    /// Creates a directory for the `ringfence` command.
    pub fn new() -> Lab {
        Lab::of(env!("CARGO_BIN_EXE_ringfence"))
    }

    /// Creates a directory in which `program` takes the place of the command.
    pub fn of(program: impl Into<PathBuf>) -> Lab {
        let directory = tempfile::tempdir().unwrap();
        // Launchers look for switches in this directory.
        let lab = Lab { directory, program: program.into(), said: Mutex::default() };
        std::fs::create_dir(lab.path("session")).unwrap();
        std::fs::create_dir(lab.path("files")).unwrap();
        lab
    }

    /// Returns the path of the command.
    pub fn program(&self) -> &str {
        self.program.to_str().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the path of a file that guests and the test share. The guests' working directory contains it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path("files").join(name)
    }

    /// Returns the content of a shared file.
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.file(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Returns the path of the runtime directory.
    pub fn runtime_dir(&self) -> PathBuf {
        self.path("session").join("ringfence")
    }

    /// Starts `ringfence run OPTIONS -- COMMAND`.
    pub fn run(&self, options: &str, command: &[&str]) -> Running {
        self.start(options, command, &[])
    }

    /// Starts `ringfence run OPTIONS -- sh -c SCRIPT`. The script stops at the first failure.
    pub fn script(&self, options: &str, script: &str) -> Running {
        self.start(options, &["sh", "-ec", script], &[])
    }

    /// Starts `WRAPPER ringfence run OPTIONS -- COMMAND`.
    pub fn start(&self, options: &str, command: &[&str], wrapper: &[&str]) -> Running {
        let mut words: Vec<&str> = wrapper.iter().copied().chain([self.program(), "run"]).collect();
        // Guests of tests send nothing to the network of the test machine.
        if !options.contains("--uplink") {
            words.extend(["--uplink", "none"]);
        }
        // Guests of one test are neighbours.
        if !options.contains("--switch") {
            words.extend(["--switch", "default"]);
        }
        words.extend(options.split_whitespace().chain(["--"]).chain(command.iter().copied()));
        self.spawn(&words)
    }

    /// Starts `ringfence WORDS OPTIONS`, which serves a device of a machine (`vhost-user`, `pool-proxy`, `shield`), and waits until
    /// it does.
    pub fn serve(&self, words: &[&str], options: &str) -> Running {
        let mut all = vec![self.program()];
        all.extend(words);
        all.extend(options.split_whitespace());
        let running = self.spawn(&all);
        let is_ready =
            || [" leads to ", " serves "].iter().any(|text| running.stderr.text().contains(text));
        assert!(eventually(MOMENT, is_ready), "{}: it serves nothing", running.title);
        running
    }

    /// Starts any command with this runtime directory.
    pub fn spawn(&self, words: &[&str]) -> Running {
        // The caller may ignore signals (a background job, nohup), and children inherit that.
        let mut child = Command::new("env")
            .arg("--default-signal")
            .args(words)
            .env("XDG_RUNTIME_DIR", self.path("session"))
            .env("PATH", needs::path_of_tests())
            .current_dir(self.path("files"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{words:?}: {error}"));
        let (stdout, stderr) = (Said::default(), Said::default());
        let readers = vec![
            stdout.listen(child.stdout.take().unwrap()),
            stderr.listen(child.stderr.take().unwrap()),
        ];
        let mut said = self.said.lock().unwrap();
        let title = words.join(" ");
        said.push((format!("{title}: stdout"), stdout.clone()));
        said.push((format!("{title}: stderr"), stderr.clone()));
        Running { title, child, stdout, stderr, readers }
    }

    /// Asks the driver domain of a switch for its counters.
    pub fn stats(&self, switch: &str) -> DriverStats {
        let directory = RuntimeDir::open_at(self.runtime_dir()).unwrap();
        let socket = directory.connect(switch).unwrap().expect("the switch is there");
        let channel = Channel::from_fd(socket);
        ringfence_driver::proof::introduce(&channel).unwrap();
        channel.send(&ToDriver::Stats, &[]).unwrap();
        match channel.receive_within(MOMENT).unwrap().0 {
            FromDriver::Stats(stats) => *stats,
            other => panic!("the driver domain answered {other:?}"),
        }
    }

    /// Checks that no switch is left after [`GONE_WITHIN`].
    pub fn assert_no_switch(&self) {
        let files = || -> Vec<String> {
            let Ok(entries) = std::fs::read_dir(self.runtime_dir()) else { return Vec::new() };
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            // A launcher that was killed, or a session of root, leaves its socket to the next client, which removes it.
            names.filter(|name| !name.ends_with(".guest") && !name.ends_with(".session")).collect()
        };
        let gone = eventually(GONE_WITHIN, || files().is_empty());
        assert!(gone, "left in the runtime directory: {:?}", files());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
            for (title, said) in said.iter().filter(|(_, said)| !said.text().is_empty()) {
                eprintln!("--- {title}\n{}", said.text());
            }
        }
    }
}

/// Process of a started command. Dropping it kills the process.
pub struct Running {
    title: String,
    child: Child,
    /// Standard output of the process.
    pub stdout: Said,
    /// Standard error of the process.
    pub stderr: Said,
    readers: Vec<std::thread::JoinHandle<()>>,
}

/// Result of a command that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Exit status, or `None` if a signal ended the command.
    pub status: Option<i32>,
    /// Standard output of the command.
    pub stdout: String,
    /// Standard error of the command and of the launcher.
    pub stderr: String,
}

impl Running {
    /// Returns the process id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the process and all processes below it.
    pub fn processes(&self) -> Vec<Process> {
        descendants(self.pid())
    }

    /// Returns the only process of `ringfence internal ROLE` below the command.
    pub fn inner(&self, role: &str) -> Process {
        let found = || self.processes().into_iter().find(|process| process.is_role(role));
        assert!(eventually(MOMENT, || found().is_some()), "{}: no process `{role}`", self.title);
        found().unwrap_or_else(|| panic!("{}: `{role}` is gone again", self.title))
    }

    /// Waits for the summary that says that the guest is on its switch. The guest's command starts then.
    pub fn wait_up(&self) -> &Running {
        self.wait_for_error(" is on switch ")
    }

    /// Waits until standard error contains the text.
    pub fn wait_for_error(&self, text: &str) -> &Running {
        let found = eventually(MOMENT, || self.stderr.text().contains(text));
        assert!(found, "{}: standard error never said {text:?}", self.title);
        self
    }

    /// Waits until standard output contains the text.
    pub fn wait_for_output(&self, text: &str) -> &Running {
        let found = eventually(MOMENT, || self.stdout.text().contains(text));
        assert!(found, "{}: standard output never said {text:?}", self.title);
        self
    }

    /// Returns `true` if the command has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the end of the command.
    pub fn finish(mut self, within: Duration) -> Finished {
        let mut status = None;
        eventually(within, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let Some(status) = status else { panic!("{}: still runs after {within:?}", self.title) };
        self.collect(status)
    }

    /// Waits for the end of the command, checks that it succeeded, and returns its output.
    pub fn succeed(self, within: Duration) -> String {
        let title = self.title.clone();
        let finished = self.finish(within);
        assert_eq!(finished.status, Some(0), "{title}: {}", finished.stderr);
        finished.stdout
    }

    /// Ends the command as Ctrl-C does, by a signal to the launcher, and waits for the end.
    pub fn end(self) -> Finished {
        rustix::process::kill_process(self.pid(), Signal::TERM).unwrap();
        self.finish(MOMENT)
    }

    fn collect(&mut self, status: ExitStatus) -> Finished {
        // The kernel kills all processes of a guest with it, so that both streams end.
        for reader in self.readers.drain(..) {
            let ended = eventually(MOMENT, || reader.is_finished());
            assert!(ended, "{}: somebody still holds its standard streams", self.title);
        }
        let status = status.code().or(status.signal().map(|signal| -signal));
        Finished { status, stdout: self.stdout.text(), stderr: self.stderr.text() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only a failed test drops a running command. The rest of the guest ends with the launcher, and
        // the switch with its last guest.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until `is_so` returns `true`. Returns `false` after the time `within`.
pub fn eventually(within: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + within;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Pseudo-random numbers (xorshift64), for disturbances only.
pub struct Noise(u64);

impl Noise {
    /// Creates the sequence of a seed.
    pub fn from_seed(seed: u64) -> Noise {
        Noise(seed | 1)
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns the next number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Writes a file of pseudo-random bytes, which are the same in every run.
pub fn write_noise(path: &Path, mebibytes: usize) {
    use std::io::Write;
    let mut noise = Noise::from_seed(0x5eed);
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    for _ in 0..mebibytes << 17 {
        file.write_all(&noise.next().to_ne_bytes()).unwrap();
    }
    file.flush().unwrap();
}

/// Returns the SHA-256 of a file, as the program of that name computes it.
pub fn sha256(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}
