//! Default list of the system calls that a command may not make, and those of `run --strict`.
//!
//! The list is in the manner of Podman's: it denies what names an object of the whole kernel, which no namespace of a
//! guest separates, or what only administrators of a computer need. Unlike Podman's, it allows namespaces and mounts: the
//! kernel lets a command do with them what its user namespace owns, and browsers, bubblewrap, Podman and another
//! `ringfence run` need them. [`NOT_IN_STRICT`] takes them away.
//!
//! A call that is newer than [`NEWEST`](super::numbers::NEWEST) fails with `ENOSYS`, so that it is judged before it is
//! allowed.

use super::families::errno;
use super::program::{Action, Condition, Rule};

/// Error of a denied call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// `EPERM`.
    Forbidden,
    /// `ENOSYS`: programs then do without, as on a kernel that lacks the call.
    Unknown,
}

impl Answer {
    fn action(self) -> Action {
        Action::Errno(errno(match self {
            Answer::Forbidden => libc::EPERM,
            Answer::Unknown => libc::ENOSYS,
        }))
    }
}

/// Calls that are denied for one reason.
struct Group {
    calls: &'static [&'static str],
    answer: Answer,
}

impl Group {
    const fn forbidden(calls: &'static [&'static str]) -> Group {
        Group { calls, answer: Answer::Forbidden }
    }

    const fn unknown(calls: &'static [&'static str]) -> Group {
        Group { calls, answer: Answer::Unknown }
    }
}

/// Rules of one call.
#[derive(Clone, Debug)]
pub(super) struct Denied {
    pub(super) call: &'static str,
    /// In their order. A call for which none holds is allowed.
    pub(super) rules: Vec<Rule>,
}

impl Denied {
    pub(super) fn always(call: &'static str, answer: Answer) -> Denied {
        Denied { call, rules: vec![Rule { when: vec![], action: answer.action() }] }
    }
}

/// Calls of io_uring, whose operations are system calls that no filter sees.
pub(super) const IO_URING: [&str; 3] = ["io_uring_setup", "io_uring_enter", "io_uring_register"];

/// Groups of the default list.
const DENIED: [Group; 11] = [
    // Keyrings belong to users and sessions of the host: `keyctl` links the keys of every session of the user. `ENOSYS` is
    // the answer with which container engines do without a keyring.
    Group::unknown(&["add_key", "keyctl", "request_key"]),
    // A ring opens files and sockets, and more with each kernel, past every filter.
    Group::forbidden(&IO_URING),
    // Events of the whole computer and of the kernel; a number of vulnerabilities.
    Group::forbidden(&["perf_event_open"]),
    // Programs, maps and links of the whole kernel, by number.
    Group::forbidden(&["bpf"]),
    // Stops the kernel at an access to memory for as long as the command likes, which makes races in it certain.
    Group::forbidden(&["userfaultfd"]),
    // Opens a file by its number, whatever is mounted over its path; also namespaces and processes.
    Group::forbidden(&["open_by_handle_at"]),
    // The kernel's own code.
    Group::forbidden(&[
        "delete_module",
        "finit_module",
        "init_module",
        "kexec_file_load",
        "kexec_load",
    ]),
    // The clock of the host. (`adjtimex` and `clock_adjtime` also read it; the kernel demands a capability to set it.)
    Group::forbidden(&["clock_settime", "clock_settime64", "settimeofday", "stime"]),
    // The log of the kernel, which names devices, addresses and processes of the host.
    Group::forbidden(&["syslog"]),
    // Accounting, swap and quotas of the host, ports of its processor, its terminals.
    Group::forbidden(&[
        "acct",
        "ioperm",
        "iopl",
        "quotactl",
        "quotactl_fd",
        "swapoff",
        "swapon",
        "vhangup",
    ]),
    // Calls that no program of today needs, and that newer kernels have removed.
    Group::unknown(&[
        "_sysctl",
        "bdflush",
        "create_module",
        "get_kernel_syms",
        "lookup_dcookie",
        "nfsservctl",
        "query_module",
        "sysfs",
        "uselib",
        "ustat",
        "vm86",
        "vm86old",
    ]),
];

/// Operations of ioctl(2) that type into a terminal: `TIOCSTI`, and `TIOCLINUX`, whose selections are pasted.
const TYPING: [u32; 2] = [0x5412, 0x541c];

/// Groups that `run --strict` denies besides.
const NOT_IN_STRICT: [Group; 3] = [
    // Changes of the file tree.
    Group::forbidden(&[
        "chroot",
        "fsconfig",
        "fsmount",
        "fsopen",
        "fspick",
        "mount",
        "mount_setattr",
        "move_mount",
        "open_tree",
        "open_tree_attr",
        "pivot_root",
        "umount",
        "umount2",
    ]),
    // Namespaces of other processes.
    Group::forbidden(&["setns"]),
    // Has its flags in memory, which a filter cannot read. The C library then uses `clone`.
    Group::unknown(&["clone3"]),
];

/// Flags of clone(2) and unshare(2) that make namespaces: mount, cgroup, UTS, IPC, user, PID, network.
const NEW_NAMESPACES: u32 = 0x7e02_0000;
/// Flag of unshare(2) for a time namespace. For `clone` the bit is part of a signal's number.
const NEW_TIME_NAMESPACE: u32 = 0x80;

fn of_groups(groups: &'static [Group]) -> impl Iterator<Item = Denied> {
    groups
        .iter()
        .flat_map(|group| group.calls.iter().map(|call| Denied::always(call, group.answer)))
}

/// Returns the rules of the default list.
pub(super) fn default_list() -> Vec<Denied> {
    let typing = TYPING.map(|operation| Rule {
        when: vec![Condition::int(1, operation)],
        action: Answer::Forbidden.action(),
    });
    let typing = Denied { call: "ioctl", rules: typing.into() };
    of_groups(&DENIED).chain([typing]).collect()
}

/// Returns the rules that `run --strict` adds to any list.
pub(super) fn strict() -> Vec<Denied> {
    let namespaces = |call, flags: u32| Denied {
        call,
        rules: vec![
            Rule { when: vec![Condition::int_masked(0, flags, 0)], action: Action::Allow },
            Rule { when: vec![], action: Answer::Forbidden.action() },
        ],
    };
    let made = [
        namespaces("clone", NEW_NAMESPACES),
        namespaces("unshare", NEW_NAMESPACES | NEW_TIME_NAMESPACE),
    ];
    of_groups(&NOT_IN_STRICT).chain(made).collect()
}
