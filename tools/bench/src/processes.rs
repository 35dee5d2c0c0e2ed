//! Processes of other programs that a benchmark starts: their directory, their end, and their CPU time.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

/// Time limit for a server to offer its service.
const UP_WITHIN: Duration = Duration::from_secs(20);
/// Time between two looks at a server that starts.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Time limit for a process to end by itself. One that is killed may leave children that still hold a file's lock.
const GONE_WITHIN: Duration = Duration::from_secs(60);

/// Directory of the sockets and messages of servers, removed on drop.
pub(crate) struct SocketDirectory(PathBuf);

impl SocketDirectory {
    pub(crate) fn new() -> anyhow::Result<SocketDirectory> {
        let path = std::env::temp_dir().join(format!("ringfence-vs-{}", std::process::id()));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("{}", path.display()))?;
        Ok(SocketDirectory(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Server process, ended on drop.
pub(crate) struct Server {
    name: &'static str,
    child: Child,
    /// File of its messages.
    said: PathBuf,
}

impl Server {
    /// Starts the process. Its messages go to a file of the directory.
    ///
    /// # Errors
    ///
    /// Returns an error if the program could not be started.
    pub(crate) fn start(
        name: &'static str,
        mut command: Command,
        place: &SocketDirectory,
    ) -> anyhow::Result<Server> {
        let said = place.file(&format!("said-by-{name}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&said)?);
        let child = command.spawn().with_context(|| {
            format!("{name} could not be started: install it, or leave it out of --vs")
        })?;
        Ok(Server { name, child, said })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns an error with the messages of the process if it has ended.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let said = fs::read_to_string(&self.said).unwrap_or_default();
            bail!("{} ended ({status}): {}", self.name, said.trim());
        }
        Ok(())
    }

    /// Waits until the server is up: until `look` returns a value, which is returned.
    ///
    /// # Errors
    ///
    /// Returns an error with the messages of a process that has ended, and an error after [`UP_WITHIN`].
    pub(crate) fn wait_up<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
        let until = Instant::now() + UP_WITHIN;
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            self.check()?;
            ensure!(Instant::now() < until, "{} is not up within {UP_WITHIN:?}", self.name);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM first, so that a launcher ends its domains.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let until = Instant::now() + GONE_WITHIN;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the CPU time of a process and its descendants in nanoseconds, with the kernel's resolution
/// of one tick.
pub(crate) fn cpu_ns(root: u32) -> anyhow::Result<u64> {
    let processes = processes()?;
    let tree = tree_of(root, &processes);
    let ticks: u64 =
        processes.iter().filter(|(pid, ..)| tree.contains(pid)).map(|(.., ticks)| ticks).sum();
    Ok(ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Returns id, parent and CPU ticks of every process.
pub(crate) fn processes() -> anyhow::Result<Vec<(u32, u32, u64)>> {
    let mut processes = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // The process may have exited meanwhile.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        processes.extend(parse_stat(&stat).map(|(parent, ticks)| (pid, parent, ticks)));
    }
    Ok(processes)
}

/// Returns the ids of a process and its descendants.
pub(crate) fn tree_of(root: u32, processes: &[(u32, u32, u64)]) -> Vec<u32> {
    let mut tree = vec![root];
    let mut at = 0;
    while let Some(parent) = tree.get(at).copied() {
        tree.extend(processes.iter().filter(|(_, of, _)| *of == parent).map(|(pid, ..)| *pid));
        at += 1;
    }
    tree
}

/// Parses a line of `/proc/PID/stat`: the parent, and ticks in user and kernel mode.
fn parse_stat(stat: &str) -> Option<(u32, u64)> {
    // The name may contain spaces and parentheses.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((u32::try_from(number(1)?).ok()?, number(11)? + number(12)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time within which a process gets a clock tick of a processor beside any load.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn server_that_ends_before_it_is_up_is_an_error_with_its_messages() {
        let place = SocketDirectory::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo refused >&2; exit 3"]);
        let mut server = Server::start("shell", command, &place).unwrap();
        let failed = server.wait_up(|| None::<()>).unwrap_err().to_string();
        assert!(failed.contains("refused") && failed.contains('3'), "{failed}");
        assert_eq!(server.wait_up(|| Some(7)).unwrap(), 7);
    }

    #[test]
    fn stat_line_parses_after_name_with_parentheses() {
        let line = "7 (a) (b c) S 3 7 7 0 -1 4194560 1 0 0 0 11 22 0 0 20 0 1 0 5 1 1";
        assert_eq!(parse_stat(line), Some((3, 33)));
        assert_eq!(parse_stat("7 (x"), None);
        // Other programs may have the processors for long.
        let (begun, until) = (cpu_ns(std::process::id()).unwrap(), Instant::now() + LONG);
        while cpu_ns(std::process::id()).unwrap() == begun {
            assert!(Instant::now() < until, "this process has used no processor time");
        }
    }
}
