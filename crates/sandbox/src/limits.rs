//! Resource limits of domains and commands.
//!
//! A driver domain outlives the launcher that started it and serves others. It must not end by that
//! launcher's `ulimit -t`, or lack memory by its `ulimit -v`.
//!
//! The limit of open files also bounds descriptors in transit: the kernel counts those of all processes of
//! a host user, and refuses to send more while the count exceeds the *sender's* limit. Launchers, driver domains,
//! frontends and guests' commands of an ordinary user share one count. Ringfence's own processes therefore have
//! the hard limit ([`raise_open_files`]), and a command a lower one that it cannot raise
//! ([`lower_open_files`]): commands cannot use up the difference.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Limits that a process inherits and that would hold for other launchers' guests.
const LIFTED: [Resource; 9] = [
    Resource::Cpu,
    Resource::Fsize,
    Resource::Data,
    Resource::As,
    Resource::Nproc,
    Resource::Memlock,
    Resource::Locks,
    Resource::Sigpending,
    Resource::Rttime,
];

/// Removes the limits where the system allows that (as root), and else raises each to its hard limit.
pub(crate) fn lift() {
    for resource in LIFTED {
        let none = Rlimit { current: None, maximum: None };
        if setrlimit(resource, none).is_err() {
            let maximum = getrlimit(resource).maximum;
            // A limit can always be raised to the hard one.
            let _ = setrlimit(resource, Rlimit { current: maximum, maximum });
        }
    }
}

/// Raises this process's limit of open files to the hard limit. Returns the limit from before, if there was one.
///
/// # Errors
///
/// Returns the error of `setrlimit`.
pub fn raise_open_files() -> io::Result<Option<u64>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    Ok(current)
}

/// Limits this process and its children to three quarters of the files that it may open, and to
/// `wanted` where that is less. No process without privilege can raise the limit again. Call it before a
/// command starts.
///
/// # Errors
///
/// Returns the error of `setrlimit`.
pub fn lower_open_files(wanted: Option<u64>) -> io::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum.map(|hard| hard - hard / 4);
    let current = match (wanted, maximum) {
        (Some(wanted), Some(maximum)) => Some(wanted.min(maximum)),
        (wanted, maximum) => wanted.or(maximum),
    };
    Ok(setrlimit(Resource::Nofile, Rlimit { current, maximum })?)
}

/// Raises the limit of open descriptors to the hard limit, and returns it. A driver domain's hub holds
/// descriptors for each guest, within quotas, and one guest must not use up those of others.
///
/// # Errors
///
/// Returns the error of the system call.
pub fn raise_descriptor_limit() -> io::Result<usize> {
    raise_open_files()?;
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(maximum.and_then(|maximum| maximum.try_into().ok()).unwrap_or(usize::MAX))
}
