//! Properties that a program gets between fork(2) and execve(2): its job, its terminal, descriptors and ignored signals.
//!
//! A shell separates the jobs that it starts in the same way. Each program here is a process group of its own, so a signal
//! to "my group" (`kill(0, SIGKILL)`) never reaches the process that started it. A child of the kernel's PID namespaces needs
//! that as well: the kernel delivers such a signal across them.

// #syscall none: a guest's init, which has no list

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::signals::SignalSet;

/// Job that a program becomes.
#[derive(Debug)]
pub enum Job {
    /// Process group of its own in the session of its parent. With the session's terminal it becomes the foreground.
    Group { foreground_of: Option<OwnedFd> },
    /// Session of its own. The terminal becomes its controlling terminal, unless another session has it.
    Session { terminal: Option<OwnedFd> },
}

/// Properties of a program that is started.
#[derive(Debug)]
pub struct Preparation {
    pub job: Job,
    /// Descriptors, and the numbers under which the program inherits them.
    pub descriptors: Vec<(OwnedFd, RawFd)>,
    /// Signals that the program ignores from its start on, besides those that its parent ignores.
    pub ignored: SignalSet,
}

/// Lets `command` start its program with these properties.
pub fn prepare(command: &mut Command, preparation: Preparation) {
    // SAFETY: the closure runs in a child that may be the fork of a process with several threads. It makes system calls
    // only: it neither allocates nor locks.
    unsafe { command.pre_exec(move || preparation.apply()) };
}

impl Preparation {
    fn apply(&self) -> io::Result<()> {
        match &self.job {
            Job::Group { foreground_of } => {
                // SAFETY: the call has numbers as arguments only.
                check(unsafe { libc::setpgid(0, 0) })?;
                if let Some(terminal) = foreground_of {
                    become_foreground(terminal.as_raw_fd())?;
                }
            }
            Job::Session { terminal } => {
                // SAFETY: the call has no argument.
                check(unsafe { libc::setsid() })?;
                if let Some(terminal) = terminal {
                    // SAFETY: the request takes a number. It fails if the terminal is another session's.
                    unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) };
                }
            }
        }
        for (from, to) in &self.descriptors {
            // SAFETY: this process becomes another program, which is to find the file under this number.
            check(unsafe { libc::dup2(from.as_raw_fd(), *to) })?;
        }
        for number in self.ignored.numbers() {
            // SAFETY: no handler is installed.
            unsafe { libc::signal(number, libc::SIG_IGN) };
        }
        Ok(())
    }
}

/// Makes this process's group the foreground of its session's terminal.
fn become_foreground(terminal: RawFd) -> io::Result<()> {
    // The kernel stops a process of the background that does this, unless the signal is blocked.
    let stops = SignalSet::from_iter([libc::SIGTTOU]);
    let before = crate::signals::mask()?;
    crate::signals::block(stops)?;
    // SAFETY: getpid and tcsetpgrp take numbers only.
    let done = check(unsafe { libc::tcsetpgrp(terminal, libc::getpid()) });
    crate::signals::replace_mask(before)?;
    // A terminal that was hung up has no foreground.
    done.or(Ok(()))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output_of(script: &str, preparation: Preparation) -> String {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        prepare(&mut command, preparation);
        let output = command.output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn program_leads_its_own_group_or_session() {
        // Process id, group and session.
        let script = "cut -d' ' -f1,5,6 /proc/$$/stat";
        let group = Preparation {
            job: Job::Group { foreground_of: None },
            descriptors: vec![],
            ignored: SignalSet::default(),
        };
        let text = output_of(script, group);
        let ids: Vec<&str> = text.split_whitespace().collect();
        assert!(ids[0] == ids[1] && ids[0] != ids[2], "{text}");
        let session = Preparation {
            job: Job::Session { terminal: None },
            descriptors: vec![],
            ignored: SignalSet::default(),
        };
        let text = output_of(script, session);
        let ids: Vec<&str> = text.split_whitespace().collect();
        assert!(ids[0] == ids[1] && ids[0] == ids[2], "{text}");
    }

    #[test]
    fn program_inherits_descriptors_by_number_and_ignored_signals() {
        let preparation = Preparation {
            job: Job::Group { foreground_of: None },
            // A number that no other descriptor of this process has.
            descriptors: vec![(nine(), 200)],
            // dash resets SIGCHLD.
            ignored: [libc::SIGPIPE, libc::SIGUSR1].into_iter().collect(),
        };
        let text = output_of("cat /proc/self/fd/200; grep SigIgn /proc/self/status", preparation);
        let (content, ignored) = text.split_once("SigIgn:").unwrap();
        assert_eq!(content, "nine\n");
        let bits = u64::from_str_radix(ignored.trim(), 16).unwrap();
        let ignored = SignalSet::from_bits(bits);
        assert!(ignored.contains(libc::SIGPIPE) && ignored.contains(libc::SIGUSR1));
    }

    fn nine() -> OwnedFd {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        rustix::io::write(&writer, b"nine\n").unwrap();
        reader
    }
}
