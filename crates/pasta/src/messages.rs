//! Messages of pasta and passt: on standard error until it is in the background, then in a log file or the system log.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::Context;

use super::args::PastaArgs;

/// Socket of the system log.
const SYSTEM_LOG: &str = "/dev/log";
/// Facility `daemon`, severities `err` and `info` (RFC 5424, section 6.2.1).
const ERROR: u8 = 3 * 8 + 3;
const INFO: u8 = 3 * 8 + 6;

/// Writer of messages to one destination at a time.
#[derive(Debug)]
pub(crate) struct Messages {
    name: &'static str,
    quiet: bool,
    debug: bool,
    log: Option<LogFile>,
    in_background: bool,
}

impl Messages {
    /// Opens the log file, if the options name one.
    pub(crate) fn new(args: &PastaArgs, name: &'static str) -> anyhow::Result<Messages> {
        let open = |path: &std::path::PathBuf| {
            LogFile::open(path, args.log_size)
                .with_context(|| format!("--log-file {}", path.display()))
        };
        let log = args.log_file.as_ref().map(open).transpose()?;
        let debug = args.debug || args.trace;
        Ok(Messages { name, quiet: args.quiet, debug, log, in_background: false })
    }

    /// Ends the use of standard error.
    pub(crate) fn leave_terminal(&mut self) {
        self.in_background = true;
    }

    /// Reports a problem, also if quiet.
    pub(crate) fn problem(&mut self, text: impl std::fmt::Display) {
        self.line(ERROR, &text.to_string());
    }

    /// Reports a result, unless quiet.
    pub(crate) fn summary(&mut self, text: impl std::fmt::Display) {
        if !self.quiet || self.debug {
            self.line(INFO, &text.to_string());
        }
    }

    /// Reports a step, with --debug.
    pub(crate) fn step(&mut self, text: impl std::fmt::Display) {
        if self.debug {
            self.line(INFO, &text.to_string());
        }
    }

    fn line(&mut self, priority: u8, text: &str) {
        // A log that cannot be written is no reason to stop.
        match (&mut self.log, self.in_background) {
            (Some(log), _) => drop(log.append(text)),
            (None, false) => drop(writeln_once(&mut io::stderr(), self.name, text)),
            (None, true) => drop(to_system_log(priority, self.name, text)),
        }
    }
}

/// Writes `NAME: TEXT` in one piece.
pub(crate) fn writeln_once(to: &mut dyn Write, name: &str, text: &str) -> io::Result<()> {
    to.write_all(format!("{name}: {text}\n").as_bytes())
}

fn to_system_log(priority: u8, name: &str, text: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    let line = format!("<{priority}>{name}[{}]: {text}", std::process::id());
    socket.send_to(line.as_bytes(), SYSTEM_LOG).map(drop)
}

/// Log file whose size is bounded: at the limit, its older half is removed.
#[derive(Debug)]
struct LogFile {
    file: File,
    limit: u64,
}

impl LogFile {
    fn open(path: &Path, limit: u64) -> io::Result<LogFile> {
        let file =
            OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
        Ok(LogFile { file, limit })
    }

    fn append(&mut self, text: &str) -> io::Result<()> {
        let line = format!("{text}\n");
        let size = self.file.metadata()?.len();
        if size + line.len() as u64 > self.limit {
            self.shrink(size)?;
        }
        self.file.write_all(line.as_bytes())
    }

    /// Keeps the newer half, from the beginning of a line on.
    fn shrink(&mut self, size: u64) -> io::Result<()> {
        let kept = self.limit / 2;
        self.file.seek(SeekFrom::Start(size.saturating_sub(kept)))?;
        let mut newer = Vec::new();
        Read::take(&mut self.file, kept).read_to_end(&mut newer)?;
        let start = newer.iter().position(|byte| *byte == b'\n').map_or(newer.len(), |at| at + 1);
        self.file.set_len(0)?;
        self.file.write_all(&newer[start..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_file_keeps_its_limit_and_the_newest_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = LogFile::open(&path, 4096).unwrap();
        for number in 0..1000 {
            log.append(&format!("line {number} with some text")).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= 4096);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("line 999 with some text\n"), "{text}");
        assert!(text.lines().all(|line| line.starts_with("line ")), "{text}");
        assert!(text.lines().count() > 50);
    }
}
