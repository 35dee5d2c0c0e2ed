//! The system calls that a frontend, an uplink or a driver domain may make: an allow list.
//!
//! The list is made by `cargo xtask syscalls` of the `#syscall` lines that stand next to the code which
//! makes the calls, in all crates, with who needs a call, for what, and the arguments it may have
//! (`xtask/src/tidy/syscalls.rs` has their grammar). `cargo xtask test` fails where the list is not what
//! the lines say; `tests/syscalls.rs` runs domains and has each call that the list lacks end them. What
//! the standard library, the C library and its allocator call is said here. All else fails with `EPERM`; no call kills, so that a library which probes for a newer call finds it missing
//! and goes on with an older one. `clone3` fails with `ENOSYS`, which is what makes the C library
//! fall back to `clone`: its flags are in a register, where a filter can see them.
//!
//! Not on the list on purpose, and tried by the tests: `ptrace`, `process_vm_*`, `pidfd_*`,
//! `process_madvise`, `open*` and every other call that takes a path, `execve*`, `socket`,
//! `memfd_create`, `io_uring_setup`, `io_uring_register`, `userfaultfd`, `bpf`, `kill`, `prctl`,
//! `mount` and its kin, `unshare`, `setns`, `mremap`, `vmsplice`.
//!
//! `io_uring_enter` is not on it either: a ring runs operations behind the filter's back, among them
//! those that are denied here. Whoever needs a ring one day makes it before the list is in force,
//! restricts it to the operations it is for (`IORING_REGISTER_RESTRICTIONS`), and adds the call.

// #syscall all mmap 2-PROT_EXEC: the allocator; stacks
// #syscall all mprotect 2-PROT_EXEC: guard pages; the allocator
// #syscall all munmap,brk: the allocator
// #syscall all madvise 2=MADV_NORMAL: undoing other advice
// #syscall all madvise 2=MADV_DONTNEED: the allocator; stacks of old threads
// #syscall all madvise 2=MADV_FREE: the allocator
// #syscall all !mremap: the allocator tries it for a large buffer that grows, and copies
// #syscall all clone 0+CLONE_VM|CLONE_THREAD|CLONE_SIGHAND 0-0x7e020000: threads; no processes, no namespaces (CLONE_NEW*)
// #syscall all clone3: reaches the filter that answers ENOSYS, so that `clone` is used: its flags can be seen
// #syscall all set_robust_list,rseq: start of a thread
// #syscall all prctl 0=PR_SET_NAME: start of a thread: its name, for who looks at it in `ps`
// #syscall all prctl 0=0x41555856: PR_GET_AUXV: rustix asks where the vDSO is
// #syscall driver,frontend,uplink !openat: how many processors there are: a control group may say; else all
// #syscall all sigaltstack: start and end of a thread: stack overflow is reported
// #syscall all sched_getaffinity: start of a thread: the C library looks at its stack; how many threads pay
// #syscall all futex: locks, joining threads
// #syscall all gettid: locks; abort
// #syscall all getpid: abort
// #syscall all tgkill 0=pid: abort
// #syscall all rt_sigaction,rt_sigprocmask: start of a thread; abort; stack overflow
// #syscall all rt_sigreturn: return from a signal handler
// #syscall all exit,exit_group: end of a thread, of the process
// #syscall all nanosleep,clock_nanosleep: sleeping
// #syscall all restart_syscall: the kernel goes on with a wait after SIGSTOP and SIGCONT
// #syscall all sched_yield: locks of libraries spin
// #syscall all clock_getres: timers
// #syscall all getrandom: hash tables; domain keys
// #syscall all close: done with a descriptor
// #syscall all newfstatat 3+AT_EMPTY_PATH: fstat, as newer C libraries do it
// #syscall all statx 2+AT_EMPTY_PATH: fstat, as the standard library does it
// #syscall all fcntl 1=F_GETFD: descriptor flags
// #syscall all fcntl 1=F_SETFD: descriptor flags
// #syscall daemon ioctl 1=0x5421: FIONBIO: O_NONBLOCK, as the standard library sets it
// #syscall all shutdown: telling a peer that there is no more
// #syscall all getrusage,clock_gettime: time, where the vDSO does not know it; CPU time and faults, for the figures
// #syscall all prlimit64 0=0 2==0: reading a limit of its own, setting none
// #syscall all poll@x86_64,epoll_wait@x86_64: waiting, by the C library's older calls

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::list::{LIST, REFUSED};
use crate::spawn::DomainKind;

/// A row of the list: one call, allowed when all of its conditions hold. A call may have several
/// rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    /// The call's number on this architecture.
    number: libc::c_long,
    /// Who may make it: a bit for each.
    who: u8,
    /// What its arguments must be.
    when: &'static [Argument],
}

/// The driver domain, which holds the hub.
pub(super) const DRIVER: u8 = 1;
/// The frontend of a guest.
pub(super) const FRONTEND: u8 = 1 << 1;
/// The uplink of a guest, which has sockets of the host's network.
pub(super) const UPLINK: u8 = 1 << 2;
/// `ringfence serve` and `ringfence attach`, which open devices as they need them.
pub(super) const DAEMON: u8 = 1 << 3;

/// A process that the list is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confined {
    /// A domain of `ringfence run`.
    Domain(DomainKind),
    /// `ringfence serve` or `ringfence attach`.
    Daemon,
}

impl Confined {
    /// Its bit in the rows of the list. A guest's command is not confined by one.
    fn bit(self) -> u8 {
        match self {
            Confined::Domain(DomainKind::Driver) => DRIVER,
            Confined::Domain(DomainKind::Frontend) => FRONTEND,
            Confined::Domain(DomainKind::Uplink) => UPLINK,
            Confined::Domain(DomainKind::Guest) => 0,
            Confined::Daemon => DAEMON,
        }
    }
}

/// A condition on an argument.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argument {
    /// Which, from 0.
    index: u8,
    /// What it must be.
    test: Test,
}

/// Test of an argument: of its low 32 bits, where nothing else is said.
#[derive(Clone, Copy, Debug)]
enum Test {
    /// This number.
    Is(u32),
    /// This number, in all 64 bits: for a pointer.
    IsWhole(u64),
    /// This number after masking.
    Masked {
        /// The bits looked at.
        mask: u32,
        /// What they must be.
        is: u32,
    },
    /// This process's id.
    OwnPid,
}

/// Why the list could not be put in force.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The list does not translate into a filter, or the kernel does not take it.
    #[error("{0}")]
    Filter(#[from] seccompiler::Error),
    /// A row of the list is malformed, or this processor is not supported.
    #[error("{0}")]
    Backend(#[from] seccompiler::BackendError),
}

/// A row of the table, for those whose bits are in `who`.
pub(super) const fn on(who: u8, number: libc::c_long, when: &'static [Argument]) -> Allowed {
    Allowed { number, who, when }
}

pub(super) const fn is(index: u8, value: i32) -> Argument {
    Argument { index, test: Test::Is(value.cast_unsigned()) }
}

pub(super) const fn is_whole(index: u8, value: u64) -> Argument {
    Argument { index, test: Test::IsWhole(value) }
}

pub(super) const fn masked(index: u8, mask: i32, value: i32) -> Argument {
    Argument { index, test: Test::Masked { mask: mask.cast_unsigned(), is: value.cast_unsigned() } }
}

pub(super) const fn has(index: u8, bits: i32) -> Argument {
    masked(index, bits, bits)
}

pub(super) const fn lacks(index: u8, bits: i32) -> Argument {
    masked(index, bits, 0)
}

pub(super) const fn own_pid(index: u8) -> Argument {
    Argument { index, test: Test::OwnPid }
}

static LOUD: OnceLock<()> = OnceLock::new();

/// From now on a call that the list lacks ends in `SIGSYS` instead of an error, in whatever process
/// the list is put in force later: for tests, which then see that the list is whole. What is refused
/// on purpose is refused as ever.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn let_denials_be_loud() {
    let _ = LOUD.set(());
}

/// Puts the list in force for all threads of this process.
///
/// # Errors
///
/// [`FilterError`]; nothing is in force then, or only the answers for what is refused.
pub fn enforce(whom: Confined) -> Result<(), FilterError> {
    // All are translated before any is in force: afterwards too little is allowed.
    let programs = programs(whom, LOUD.get().is_some())?;
    // Each allows what putting the next in force needs; TSYNC orders the rest.
    for program in &programs {
        seccompiler::apply_filter_all_threads(program)?;
    }
    Ok(())
}

/// The filters, the list's last. The strictest answer of all counts.
fn programs(whom: Confined, loud: bool) -> Result<Vec<BpfProgram>, FilterError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let refuse = |rules, errno: i32| {
        let answer = SeccompAction::Errno(errno.cast_unsigned());
        BpfProgram::try_from(SeccompFilter::new(rules, SeccompAction::Allow, answer, arch)?)
    };
    let mut programs = vec![refuse([(libc::SYS_clone3, Vec::new())].into(), libc::ENOSYS)?];
    let mut allowed = rules(LIST, whom)?;
    let mut otherwise = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    if loud {
        let refused = rules(REFUSED, whom)?;
        programs.push(refuse(refused.clone(), libc::EPERM)?);
        // These are answered by the filter just made.
        allowed.extend(refused);
        otherwise = SeccompAction::Trap;
    }
    let list = SeccompFilter::new(allowed, otherwise, SeccompAction::Allow, arch)?;
    programs.push(list.try_into()?);
    Ok(programs)
}

/// A list as `seccompiler` has it: an empty vector means "whatever the arguments".
fn rules(list: &[Allowed], whom: Confined) -> Result<BTreeMap<i64, Vec<SeccompRule>>, FilterError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for row in list.iter().filter(|row| row.who & whom.bit() != 0) {
        let of_call = rules.entry(row.number).or_default();
        if !row.when.is_empty() {
            let conditions = row.when.iter().map(condition).collect::<Result<Vec<_>, _>>()?;
            of_call.push(SeccompRule::new(conditions)?);
        }
    }
    Ok(rules)
}

fn condition(argument: &Argument) -> Result<SeccompCondition, seccompiler::BackendError> {
    let (operator, value) = match argument.test {
        Test::IsWhole(value) => {
            let (length, operator) = (SeccompCmpArgLen::Qword, SeccompCmpOp::Eq);
            return SeccompCondition::new(argument.index, length, operator, value);
        }
        Test::Is(value) => (SeccompCmpOp::Eq, value),
        Test::Masked { mask, is } => (SeccompCmpOp::MaskedEq(mask.into()), is),
        Test::OwnPid => (SeccompCmpOp::Eq, std::process::id()),
    };
    SeccompCondition::new(argument.index, SeccompCmpArgLen::Dword, operator, value.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_both_free_and_conditional() {
        for bit in [DRIVER, FRONTEND, UPLINK, DAEMON] {
            let rows = || LIST.iter().filter(|row| row.who & bit != 0);
            for row in rows() {
                let of_call = || rows().filter(|other| other.number == row.number);
                let free = of_call().filter(|other| other.when.is_empty()).count();
                assert!(free == 0 || of_call().count() == 1, "call {} of {bit}", row.number);
            }
        }
    }

    #[test]
    fn the_list_translates_for_all() {
        let domain = Confined::Domain;
        let domains = [DomainKind::Driver, DomainKind::Frontend, DomainKind::Uplink].map(domain);
        for whom in domains.into_iter().chain([Confined::Daemon]) {
            let rules = rules(LIST, whom).unwrap();
            let flushes = matches!(whom, Confined::Domain(DomainKind::Driver) | Confined::Daemon);
            assert_eq!(rules.contains_key(&libc::SYS_fdatasync), flushes);
            assert_eq!(rules.contains_key(&libc::SYS_openat), whom == Confined::Daemon);
            // To hosts for a guest; to the servers of disks.
            let connects = matches!(whom, Confined::Domain(DomainKind::Uplink) | Confined::Daemon);
            assert_eq!(rules.contains_key(&libc::SYS_connect), connects);
            for loud in [false, true] {
                for program in programs(whom, loud).unwrap() {
                    // The kernel takes 4096 instructions.
                    assert!(program.len() < 1000, "{}", program.len());
                }
            }
        }
    }
}
