//! Guests from Rust: [`Guest`] does what `ringfence run` does, for programs.
//!
//! A [`GuestBuilder`] collects the words of a command line of `ringfence run` and checks them with the parser of that
//! command, so every option has one meaning. `spawn` starts the program `ringfence`, which becomes the guest's launcher:
//!
//! ```text
//! caller ── GuestBuilder::spawn ──> ringfence run ... -- COMMAND      (launcher: Guest::run)
//!        <── Running::wait ──────── exit status
//! ```
//!
//! The launcher handles signals and starts processes of its own program for its roles, so it is a process of its own and
//! not a thread of the caller. The program is found in `PATH`, or [`GuestBuilder::program`] names it.
//!
//! ```no_run
//! use ringfence::Guest;
//!
//! let mut guest = Guest::builder(["python3", "-m", "http.server"]).name("web").publish("8080:8000").spawn()?;
//! println!("{} is at {:?}", guest.name(), guest.addresses());
//! guest.stop()?;
//! # Ok::<(), ringfence::GuestError>(())
//! ```

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::{self, Cli, RunArgs};
use crate::commands::{Description, find};
use crate::launch::{self, Options};

/// Time limit for a guest to be ready. The launcher's own limits are shorter.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Time from SIGTERM to SIGKILL in [`Running::stop`].
const STOP_WITHIN: Duration = Duration::from_secs(10);
/// Interval between looks at a launcher.
const LOOK: Duration = Duration::from_millis(10);

/// Errors of guests started from Rust.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// An option is malformed or contradicts another one. The text is that of `ringfence run`.
    #[error("{0}")]
    Options(String),
    #[error("the program {} cannot be started: {source}", program.display())]
    Program { program: PathBuf, source: io::Error },
    #[error("the guest was not ready within {READY_WITHIN:?}")]
    NotReady,
    #[error("the launcher of the guest: {0}")]
    System(#[from] io::Error),
}

/// A guest that can be run, with all its options.
#[derive(Clone, Debug)]
pub struct Guest {
    options: Options,
}

impl From<RunArgs> for Guest {
    fn from(arguments: RunArgs) -> Guest {
        Guest { options: arguments.into_options() }
    }
}

impl Guest {
    /// Begins a guest that runs a command. An empty command is the user's shell.
    pub fn builder<W: Into<OsString>>(command: impl IntoIterator<Item = W>) -> GuestBuilder {
        GuestBuilder {
            program: "ringfence".into(),
            words: vec!["--quiet".into()],
            command: command.into_iter().map(Into::into).collect(),
            stdio: [None, None, None],
        }
    }

    /// Runs the guest with this process as its launcher: the whole of `ringfence run`. Returns the exit status. Only
    /// the program `ringfence` can be a launcher.
    pub(crate) fn run(&self) -> u8 {
        launch::run(&self.options)
    }
}

/// Builder of a guest. Each method is an option of `ringfence run`; [`GuestBuilder::spawn`] checks them all.
#[derive(Debug)]
pub struct GuestBuilder {
    program: PathBuf,
    words: Vec<OsString>,
    command: Vec<OsString>,
    stdio: [Option<Stdio>; 3],
}

impl GuestBuilder {
    /// Sets the program `ringfence`, in place of the one that is found in `PATH`.
    #[must_use]
    pub fn program(mut self, program: impl AsRef<Path>) -> GuestBuilder {
        program.as_ref().clone_into(&mut self.program);
        self
    }

    /// Adds an option without a value, such as `--strict-sni`.
    #[must_use]
    pub fn flag(mut self, name: &str) -> GuestBuilder {
        self.words.push(name.into());
        self
    }

    /// Adds an option with its value, such as `--mtu` and `1500`.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl AsRef<OsStr>) -> GuestBuilder {
        // One word, so that a value that begins with `-` is no option.
        let mut word = OsString::from(name);
        word.push("=");
        word.push(value);
        self.words.push(word);
        self
    }

    /// Sets the name by which other guests find this one (`--name`).
    #[must_use]
    pub fn name(self, name: &str) -> GuestBuilder {
        self.option("--name", name)
    }

    /// Sets the switch (`--switch`); `none` for no switch.
    #[must_use]
    pub fn switch(self, switch: &str) -> GuestBuilder {
        self.option("--switch", switch)
    }

    /// Sets the uplink (`--uplink`): `host` or `none`.
    #[must_use]
    pub fn uplink(self, uplink: &str) -> GuestBuilder {
        self.option("--uplink", uplink)
    }

    /// Publishes a port (`-p`), such as `8080:80`.
    #[must_use]
    pub fn publish(self, port: &str) -> GuestBuilder {
        self.option("--publish", port)
    }

    /// Adds a disk (`--disk`): a file, a block device or an NBD server.
    #[must_use]
    pub fn disk(self, disk: impl AsRef<OsStr>) -> GuestBuilder {
        self.option("--disk", disk)
    }

    /// Allows a destination (`--allow`). The first rule denies all others.
    #[must_use]
    pub fn allow(self, rule: &str) -> GuestBuilder {
        self.option("--allow", rule)
    }

    /// Denies a destination (`--deny`).
    #[must_use]
    pub fn deny(self, rule: &str) -> GuestBuilder {
        self.option("--deny", rule)
    }

    /// Adds the rules of a file (`--policy`).
    #[must_use]
    pub fn policy(self, file: impl AsRef<Path>) -> GuestBuilder {
        self.option("--policy", file.as_ref())
    }

    /// Sets the command's standard input. Inherited by default.
    #[must_use]
    pub fn stdin(mut self, stdin: impl Into<Stdio>) -> GuestBuilder {
        self.stdio[0] = Some(stdin.into());
        self
    }

    /// Sets the command's standard output. Inherited by default.
    #[must_use]
    pub fn stdout(mut self, stdout: impl Into<Stdio>) -> GuestBuilder {
        self.stdio[1] = Some(stdout.into());
        self
    }

    /// Sets the command's standard error, which is also that of the launcher. Inherited by default.
    #[must_use]
    pub fn stderr(mut self, stderr: impl Into<Stdio>) -> GuestBuilder {
        self.stdio[2] = Some(stderr.into());
        self
    }

    /// Returns the arguments of `ringfence`.
    fn arguments(&self) -> impl Iterator<Item = OsString> {
        let run = [OsString::from("run")].into_iter().chain(self.words.iter().cloned());
        run.chain([OsString::from("--")]).chain(self.command.iter().cloned())
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns [`GuestError::Options`] with the message of `ringfence run`.
    pub fn build(&self) -> Result<Guest, GuestError> {
        let words = [OsString::from("ringfence")].into_iter().chain(self.arguments());
        let parsed = Cli::try_parse_from(words);
        match parsed.map_err(|error| GuestError::Options(error.to_string()))?.command {
            cli::Command::Run(arguments) => Ok(arguments.into()),
            _ => Err(GuestError::Options("these are not options of `run`".to_owned())),
        }
    }

    /// Starts the guest. Returns when its command runs or has ended.
    ///
    /// # Errors
    ///
    /// Fails if an option is wrong or the program cannot be started. A guest that fails later has the exit status 125,
    /// and the launcher writes the reason to standard error.
    pub fn spawn(mut self) -> Result<Running, GuestError> {
        self.build()?;
        let mut launcher = Command::new(&self.program);
        launcher.args(self.arguments());
        let [stdin, stdout, stderr] = std::mem::take(&mut self.stdio);
        stdin.map(|stdin| launcher.stdin(stdin));
        stdout.map(|stdout| launcher.stdout(stdout));
        stderr.map(|stderr| launcher.stderr(stderr));
        let child = launcher
            .spawn()
            .map_err(|source| GuestError::Program { program: self.program.clone(), source })?;
        let mut running = Running { child, description: None };
        running.wait_until_ready()?;
        Ok(running)
    }
}

/// A started guest. Dropping it leaves the guest running, like [`Child`].
#[derive(Debug)]
pub struct Running {
    child: Child,
    /// Description by the launcher. `None` if the command ended before the launcher gave it.
    description: Option<Description>,
}

impl Running {
    fn wait_until_ready(&mut self) -> Result<(), GuestError> {
        let until = Instant::now() + READY_WITHIN;
        while self.child.try_wait()?.is_none() {
            self.description = find::of_launcher(self.pid());
            if self.description.is_some() {
                break;
            }
            if Instant::now() > until {
                self.child.kill()?;
                self.child.wait()?;
                return Err(GuestError::NotReady);
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Returns the process id of the launcher, by which `ringfence exec` and `stop` find the guest, too.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the guest's name. Empty if the command has ended at once.
    pub fn name(&self) -> &str {
        self.description.as_ref().map_or("", |guest| &guest.name)
    }

    /// Returns the addresses on the switch, with their prefix lengths. Empty if the command has ended at once.
    pub fn addresses(&self) -> &[String] {
        self.description.as_ref().map_or(&[], |guest| &guest.addresses)
    }

    /// Returns the addresses on the host's network, with their prefix lengths.
    pub fn uplink_addresses(&self) -> &[String] {
        self.description.as_ref().map_or(&[], |guest| &guest.uplink)
    }

    /// Returns the launcher as a child process, for pipes to the command.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits for the end of the command. The exit code is the command's; 125 if Ringfence failed, 126 or 127 if the
    /// command could not be started, 128 + N if signal N ended it.
    ///
    /// # Errors
    ///
    /// Fails if the launcher cannot be waited for.
    pub fn wait(&mut self) -> Result<ExitStatus, GuestError> {
        Ok(self.child.wait()?)
    }

    /// Ends the guest: SIGTERM to its command, and SIGKILL to the guest if that does not end it within ten seconds.
    ///
    /// # Errors
    ///
    /// Fails if the launcher cannot be waited for.
    pub fn stop(&mut self) -> Result<ExitStatus, GuestError> {
        let until = Instant::now() + STOP_WITHIN;
        if self.child.try_wait()?.is_none() {
            let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
            // The launcher is not reaped yet, so the process id is still its own.
            pid.map_or(Ok(()), |pid| kill_process(pid, Signal::TERM)).map_err(io::Error::from)?;
        }
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(LOOK);
        }
        self.child.kill()?;
        Ok(self.child.wait()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::options::SwitchChoice;

    #[test]
    fn builder_has_the_options_of_the_command_line() {
        let builder = Guest::builder(["sh", "-c", "--name x"]).name("Web").switch("none");
        let builder = builder.publish("8080:80").allow("example.org:443").option("--mtu", "1500");
        let options = builder.build().unwrap().options;
        assert_eq!((options.name.as_deref(), options.switch), (Some("web"), SwitchChoice::None));
        assert_eq!((options.forwards.len(), options.mtu), (1, Some(1500)));
        assert!(options.egress.are_given());
        assert_eq!(options.command, ["sh", "-c", "--name x"]);
    }

    #[test]
    fn wrong_option_is_refused_before_anything_starts() {
        let wrong = Guest::builder(["true"]).name("a_b").program("/nonexistent").spawn();
        let Err(GuestError::Options(why)) = wrong else { panic!("{wrong:?}") };
        assert!(why.contains("not allowed in a name"), "{why}");
        let missing = Guest::builder(["true"]).program("/nonexistent").spawn();
        assert!(matches!(missing, Err(GuestError::Program { .. })), "{missing:?}");
    }
}
