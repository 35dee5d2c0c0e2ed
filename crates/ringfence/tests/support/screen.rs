//! Terminal of a test, with a session on it.

use std::fs::File;
use std::io::Write;
use std::process::{Child, Command, Stdio};

use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use super::needs::Need;
use super::{Lab, MOMENT, Said, eventually};

/// Program that starts a session with a controlling terminal of its own.
pub const SETSID: Need = Need::Program("setsid", "util-linux");

/// Terminal with a session on it.
pub struct Screen {
    /// End of the terminal of whoever types.
    pub keyboard: File,
    /// All that has been on the screen.
    pub said: Said,
    /// Leader of the session.
    pub session: Child,
    read: usize,
}

impl Screen {
    /// Starts a command as the leader of a session on a new terminal.
    pub fn start(lab: &Lab, command: &[&str]) -> Screen {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags).unwrap();
        rustix::pty::grantpt(&master).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
        let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let session = Command::new("setsid")
            // The caller may ignore signals, and children inherit that.
            .args(["--ctty", "--wait", "env", "--default-signal"])
            .args(command)
            .env("XDG_RUNTIME_DIR", lab.runtime_dir().parent().unwrap())
            .env("PS1", "outer> ")
            .env_remove("ENV")
            .current_dir(lab.file("x").parent().unwrap())
            .stdin(Stdio::from(slave.try_clone().unwrap()))
            .stdout(Stdio::from(slave.try_clone().unwrap()))
            .stderr(Stdio::from(slave))
            .spawn()
            .unwrap();
        let keyboard = File::from(master);
        let said = Said::default();
        // Reading ends with the last process on the terminal.
        said.listen(keyboard.try_clone().unwrap());
        Screen { keyboard, said, session, read: 0 }
    }

    /// Presses keys of the terminal.
    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Types a line to `cat`. The terminal echoes it, and `cat` repeats it.
    pub fn type_to_cat(&mut self, line: &str) {
        self.press(&format!("{line}\n"));
        self.expect(line);
        self.expect(line);
    }

    /// Waits until the text is on the screen, after the text of the last call. Returns what is between both.
    pub fn expect(&mut self, text: &str) -> String {
        let found = eventually(MOMENT, || self.said.text()[self.read..].contains(text));
        let all = self.said.text();
        assert!(found, "{text:?} did not come; the screen:\n{all}");
        let begin = self.read;
        let at = begin + all[begin..].find(text).unwrap();
        self.read = at + text.len();
        all[begin..at].to_owned()
    }

    /// Changes the width of the window.
    pub fn resize(&self, columns: u16) {
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&self.keyboard, size).unwrap();
    }

    /// Hangs up the terminal, as the end of its session's leader does.
    pub fn hang_up(&mut self) {
        self.session.kill().unwrap();
        self.session.wait().unwrap();
    }

    /// Waits for the end of the session. Returns the leader's exit status.
    pub fn finish(mut self) -> i32 {
        let mut status = None;
        eventually(MOMENT, || {
            status = self.session.try_wait().unwrap();
            status.is_some()
        });
        let status =
            status.unwrap_or_else(|| panic!("still runs; the screen:\n{}", self.said.text()));
        status.code().unwrap()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The kernel hangs up a session without leader and terminal.
        let _ = self.session.kill();
        let _ = self.session.wait();
    }
}
