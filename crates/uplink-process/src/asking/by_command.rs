//! Commands that answer: one process of `sh -c` for each question.
//!
//! A command reads the question as a JSON line from standard input, and from the variables `RINGFENCE_ASK_GUEST` and
//! `RINGFENCE_ASK_RULE`. It answers by a word, or a JSON line, on standard output. The question ends with its output, and the
//! process group of the command with the question.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::Context;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use super::question::{AnswerWord, Question};

/// Maximum length of an answer in bytes.
const OUTPUT_MAX: usize = 4096;

/// Command that has been started for a question.
#[derive(Debug)]
struct Running {
    number: u64,
    child: Child,
    output: ChildStdout,
    read: Vec<u8>,
}

impl Running {
    /// Reads what the command has written. Returns `true` at the end of a line, or of the output.
    fn read(&mut self) -> bool {
        let mut bytes = [0; OUTPUT_MAX];
        loop {
            match rustix::io::read(&self.output, &mut bytes) {
                Ok(0) => return true,
                Ok(count) => self.read.extend_from_slice(&bytes[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
            if self.read.contains(&b'\n') || self.read.len() > OUTPUT_MAX {
                return true;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        // It may have ended by itself.
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        let _ = self.child.wait();
    }
}

/// Commands of one guest.
#[derive(Debug)]
pub(super) struct Commands {
    command: String,
    /// Directory in which the commands start: the asker may leave its own.
    directory: PathBuf,
    running: Vec<Running>,
}

impl Commands {
    /// # Errors
    ///
    /// Returns the reason for which the current directory is unknown.
    pub(super) fn new(command: String) -> anyhow::Result<Commands> {
        let directory = std::env::current_dir().context("--ask: the current directory")?;
        Ok(Commands { command, directory, running: Vec::new() })
    }

    /// Starts the command for a question.
    ///
    /// # Errors
    ///
    /// Returns a message for the user.
    pub(super) fn start(
        &mut self,
        question: &Question,
        guest: &str,
        line: &str,
    ) -> Result<(), String> {
        let running = self.spawn(question, guest, line);
        let running =
            running.map_err(|error| format!("--ask exec:{}: sh: {error}", self.command))?;
        self.running.push(running);
        Ok(())
    }

    fn spawn(&self, question: &Question, guest: &str, line: &str) -> io::Result<Running> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", &self.command])
            .current_dir(&self.directory)
            .env("RINGFENCE_ASK_GUEST", guest)
            .env("RINGFENCE_ASK_RULE", question.subject.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()?;
        if let Some(mut input) = child.stdin.take() {
            // A pipe has room for a line. A command need not read it.
            let _ = input.write_all(line.as_bytes());
        }
        let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let running = Running { number: question.number, child, output, read: Vec::new() };
        let flags = rustix::fs::fcntl_getfl(&running.output)?;
        rustix::fs::fcntl_setfl(&running.output, flags | OFlags::NONBLOCK)?;
        Ok(running)
    }

    /// Ends the command of a question.
    pub(super) fn stop(&mut self, number: u64) {
        self.running.retain(|running| running.number != number);
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.running.iter().map(|running| running.output.as_fd())
    }

    /// Returns answers with the numbers of their questions. An error is a message about a command that gave none.
    pub(super) fn take_answers(&mut self) -> Vec<(u64, Result<AnswerWord, String>)> {
        let done = self.running.extract_if(.., Running::read);
        done.map(|running| {
            let word = AnswerWord::of_output(&String::from_utf8_lossy(&running.read));
            let problem = || {
                format!("--ask exec:{}: it answered none of once, run, always, deny", self.command)
            };
            (running.number, word.ok_or_else(problem))
        })
        .collect()
    }
}
