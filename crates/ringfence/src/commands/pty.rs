//! Terminal of a command that `ringfence exec` starts, and its connection to the user's terminal.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::pty::OpenptFlags;
use rustix::termios::{OptionalActions, Termios, isatty};

/// Time for the last output of a command whose terminal another process keeps open.
const LAST_OUTPUT: Duration = Duration::from_millis(300);

/// New terminal, whose master end is copied to and from standard output and input. The user's terminal is in raw
/// mode until this is dropped.
pub(super) struct Pty {
    master: File,
    modes: Termios,
    output: Option<JoinHandle<()>>,
}

impl Pty {
    /// Makes a terminal if standard input and output are one. Returns its other end for the command.
    pub(super) fn open() -> io::Result<Option<(Pty, OwnedFd)>> {
        let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
        if !isatty(stdin) || !isatty(stdout) {
            return Ok(None);
        }
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::grantpt(&master)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
        let slave = rustix::fs::open(
            path,
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        let modes = rustix::termios::tcgetattr(stdin)?;
        let pty = Pty { master: File::from(master), modes, output: None };
        pty.resize();
        Ok(Some((pty, slave)))
    }

    /// Puts the user's terminal into raw mode and starts to copy in both directions.
    pub(super) fn start(&mut self) -> io::Result<()> {
        let mut raw = self.modes.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &raw)?;
        let (mut keys, mut output) = (self.master.try_clone()?, self.master.try_clone()?);
        // Ends with the process: it blocks in a read of standard input.
        std::thread::Builder::new().name("input".to_owned()).spawn(move || {
            let _ = io::copy(&mut io::stdin().lock(), &mut keys);
        })?;
        let copy = move || {
            let mut bytes = [0; 4096];
            // Fails with EIO after the last process has closed the terminal.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                let mut stdout = io::stdout().lock();
                if stdout.write_all(&bytes[..count]).and_then(|()| stdout.flush()).is_err() {
                    break;
                }
            }
        };
        self.output = Some(std::thread::Builder::new().name("output".to_owned()).spawn(copy)?);
        Ok(())
    }

    /// Gives the terminal the size of the user's.
    pub(super) fn resize(&self) {
        // Fails if the user's terminal was hung up.
        if let Ok(size) = rustix::termios::tcgetwinsize(rustix::stdio::stdin()) {
            let _ = rustix::termios::tcsetwinsize(&self.master, size);
        }
    }

    /// Waits a short time for the rest of the output.
    pub(super) fn finish(&self) {
        let until = Instant::now() + LAST_OUTPUT;
        while self.output.as_ref().is_some_and(|thread| !thread.is_finished())
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ =
            rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.modes);
    }
}
