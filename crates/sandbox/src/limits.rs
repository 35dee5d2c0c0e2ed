//! Resource limits of a driver domain.
//!
//! A driver domain outlives the launcher that started it and serves others. It must not end by that
//! launcher's `ulimit -t`, or lack memory by its `ulimit -v`.

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
