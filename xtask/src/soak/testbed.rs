//! Testbed of the soak tests: guests on their own switch, and the resources of their processes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal};

/// Time limit for the start of a guest.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Runtime directory and working directory of the guests.
pub(super) struct Testbed {
    program: PathBuf,
    mode: String,
    directory: PathBuf,
}

/// Running guest. Its launcher is killed on drop.
pub(super) struct Guest {
    pub(super) launcher: Child,
}

/// Process, by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process(u32);

impl Testbed {
    pub(super) fn new(program: PathBuf, mode: String) -> anyhow::Result<Testbed> {
        let name = format!("ringfence-soak-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        Ok(Testbed { program, mode, directory })
    }

    /// Returns the path of a file in the working directory.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the program and mode of the guests, for the output.
    pub(super) fn describe(&self) -> String {
        format!("{}, mode {}", self.program.display(), self.mode)
    }

    /// Starts `ringfence run -q OPTIONS -- COMMAND` with standard output in a pipe.
    pub(super) fn start(&self, options: &[&str], command: &[&str]) -> anyhow::Result<Guest> {
        let launcher = Command::new(&self.program)
            .args(["run", "-q", "--uplink", "none", "--switch", "soak", "--mode", &self.mode])
            .args(options)
            .arg("--")
            .args(command)
            .env("XDG_RUNTIME_DIR", &self.directory)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))?;
        Ok(Guest { launcher })
    }

    /// Runs a command as [`Testbed::start`] does, waits for its end and returns standard output.
    pub(super) fn run(&self, options: &[&str], command: &[&str]) -> anyhow::Result<String> {
        let mut guest = self.start(options, command)?;
        let mut output = String::new();
        if let Some(mut stdout) = guest.launcher.stdout.take() {
            std::io::Read::read_to_string(&mut stdout, &mut output)?;
        }
        let status = guest.launcher.wait()?;
        anyhow::ensure!(status.success(), "`{}` in a guest: {status}", command.join(" "));
        Ok(output)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("{} stays: {error}", self.directory.display());
        }
    }
}

impl Guest {
    /// Returns the process `ringfence internal ROLE` of this guest. The first guest on a switch also started
    /// the driver domain.
    pub(super) fn process(&mut self, role: &str) -> anyhow::Result<Process> {
        let deadline = Instant::now() + START_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.launcher.try_wait()? {
                bail!("a guest ended too early: {status}");
            }
            if let Some(process) = Process(self.launcher.id()).find_below(role) {
                return Ok(process);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("a guest has no process `{role}`")
    }

    /// Terminates the guest and waits for its end.
    pub(super) fn end(mut self) -> anyhow::Result<ExitStatus> {
        rustix::process::kill_process(Pid::from_child(&self.launcher), Signal::TERM)?;
        Ok(self.launcher.wait()?)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Fails if the guest has ended already, which is no error.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

impl Process {
    fn find_below(self, role: &str) -> Option<Process> {
        let id = self.0;
        let command = std::fs::read(format!("/proc/{id}/cmdline")).ok()?;
        let mut words = command.split(|byte| *byte == 0).skip(1);
        if words.next() == Some(b"internal") && words.next() == Some(role.as_bytes()) {
            return Some(self);
        }
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        let children = children.split_whitespace().filter_map(|word| word.parse().ok());
        children.map(Process).find_map(|child| child.find_below(role))
    }

    /// Sends a signal to the process.
    pub(super) fn signal(self, signal: Signal) -> anyhow::Result<()> {
        let id = i32::try_from(self.0).ok().and_then(Pid::from_raw).context("process id")?;
        Ok(rustix::process::kill_process(id, signal)?)
    }

    /// Returns the number of open descriptors; `None` without permission to count them.
    pub(super) fn descriptors(self) -> Option<u64> {
        let entries = std::fs::read_dir(Path::new("/proc").join(self.0.to_string()).join("fd"));
        u64::try_from(entries.ok()?.count()).ok()
    }

    /// Returns the resident memory in KiB: all of it, and the private part. The rest is the program's file and
    /// arenas. It is bounded, but grows when their pages are used for the first time.
    pub(super) fn memory(self) -> Option<(u64, u64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some((field("VmRSS:")?, field("RssAnon:")?))
    }
}
