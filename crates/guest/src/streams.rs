//! Standard streams of the guest's command.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use ringfence_sys::child::Job;
use ringfence_sys::namespaces;

use crate::command::Start;
use crate::read_only_files;
use crate::terminal::{self, CommandTerminal};

/// Standard streams and other descriptors of the command, and its terminal.
pub(crate) struct Streams {
    pub(crate) stdin: OwnedFd,
    /// Set if `stdin` is a file that was opened again.
    pub(crate) is_reopened: bool,
    /// Files that were opened again, and the numbers of their descriptors.
    files: Vec<(OwnedFd, RawFd)>,
    pub(crate) terminal: CommandTerminal,
    /// End of the command's own terminal that the launcher serves.
    pub(crate) launchers: Option<OwnedFd>,
}

impl Streams {
    /// Opens files again through read-only paths of the view.
    ///
    /// # Errors
    /// Those of the list of inherited descriptors.
    pub(crate) fn new(
        mut stdin: OwnedFd,
        terminal: CommandTerminal,
        launchers: Option<OwnedFd>,
        has_read_only_paths: bool,
    ) -> io::Result<Streams> {
        let (mut is_reopened, mut files) = (false, Vec::new());
        if has_read_only_paths {
            if let Some(again) = read_only_files::reopen(stdin.as_raw_fd()) {
                (stdin, is_reopened) = (again, true);
            }
            let inherited = namespaces::inheritable_fds()?;
            let numbers = terminal::OUTPUTS.into_iter().chain(inherited);
            files.extend(
                numbers.filter_map(|number| Some((read_only_files::reopen(number)?, number))),
            );
        }
        Ok(Streams { stdin, is_reopened, files, terminal, launchers })
    }

    /// Returns the properties with which the command starts, and its terminal.
    pub(crate) fn into_start(self, foreground: bool) -> io::Result<(Start, CommandTerminal)> {
        let mut descriptors = self.files;
        descriptors.extend(self.terminal.descriptors()?);
        let foreground_of = if foreground { self.terminal.for_foreground()? } else { None };
        let start = Start { stdin: self.stdin, descriptors, job: Job::Group { foreground_of } };
        Ok((start, self.terminal))
    }
}
