//! Seccomp list: the system calls that a frontend, an uplink, a driver domain, a disk, a card, a shield, a proxy or a daemon may make.
//!
//! `cargo xtask syscalls` generates the list (`list.rs`) from `#syscall` lines. These stand beside
//! the code that makes the calls, in all crates. Each line names the processes that need a call,
//! its purpose and the permitted arguments; `xtask/src/tidy/syscalls.rs` has the grammar. `cargo
//! xtask test` fails if list and lines differ. `tests/syscalls.rs` runs domains in which a call
//! that the list lacks ends the process. The lines for the standard library, the C library and its
//! allocator are below.
//!
//! Every other call fails with `EPERM`. No call kills the process: a library that probes for a
//! newer call gets an error and uses an older one. `clone3` fails with `ENOSYS`, so that the C
//! library falls back to `clone`, whose flags are in a register that a filter can read.
//!
//! Deliberately missing, and tried by the tests: `ptrace`, `process_vm_*`, `pidfd_*`,
//! `process_madvise`, `open*` and every other call that takes a path, `execve*`, `socket`,
//! `memfd_create`, `io_uring_setup`, `io_uring_register`, `userfaultfd`, `bpf`, `kill`, `prctl`,
//! `mount` and related calls, `unshare`, `setns`, `mremap`, `vmsplice`.
//!
//! A ring of `io_uring` executes operations that the filter does not see. A process with disks makes its
//! rings before the list is in force, with restrictions, and may enter them (`UringPool` of `memory`).

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
// #syscall driver,frontend,uplink,disk,proxy,card,shield !openat: how many processors there are: a control group may say; else all
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

/// Row of the list: one call, allowed if all conditions hold. A call may have several rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    /// Number of the call on this architecture.
    number: libc::c_long,
    /// Set of the processes that may make the call, one bit each.
    who: u8,
    when: &'static [Argument],
}

/// Driver domain, which also contains the hub.
pub(super) const DRIVER: u8 = 1;
pub(super) const FRONTEND: u8 = 1 << 1;
/// Uplink of a guest, which opens sockets in the host's network.
pub(super) const UPLINK: u8 = 1 << 2;
/// `ringfence serve` and `ringfence attach`, which open devices at run time.
pub(super) const DAEMON: u8 = 1 << 3;
/// Disk of a virtual machine, whose hypervisor connects to a socket.
pub(super) const DISK: u8 = 1 << 4;
/// Proxy between a virtual machine and a foreign backend.
pub(super) const PROXY: u8 = 1 << 5;
/// Network card of a virtual machine, whose hypervisor connects to a socket.
pub(super) const CARD: u8 = 1 << 6;
/// Shield between a virtual machine and a foreign backend.
pub(super) const SHIELD: u8 = 1 << 7;

/// Process to which the list is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confined {
    Domain(DomainKind),
    Daemon,
}

impl Confined {
    /// Returns the process's bit in the rows of the list. The list does not apply to a guest's
    /// command.
    fn bit(self) -> u8 {
        match self {
            Confined::Domain(DomainKind::Driver) => DRIVER,
            Confined::Domain(DomainKind::Frontend) => FRONTEND,
            Confined::Domain(DomainKind::Uplink) => UPLINK,
            Confined::Domain(DomainKind::Disk) => DISK,
            Confined::Domain(DomainKind::Proxy) => PROXY,
            Confined::Domain(DomainKind::Card) => CARD,
            Confined::Domain(DomainKind::Shield) => SHIELD,
            Confined::Domain(DomainKind::Guest) => 0,
            Confined::Daemon => DAEMON,
        }
    }
}

/// Condition on one argument.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argument {
    /// Position of the argument, from 0.
    index: u8,
    test: Test,
}

/// Test of an argument's low 32 bits, unless the variant says otherwise.
#[derive(Clone, Copy, Debug)]
enum Test {
    /// Equal to this number.
    Is(u32),
    /// All 64 bits equal to this number, for a pointer.
    IsWhole(u64),
    /// Equal to a number after masking.
    Masked { mask: u32, is: u32 },
    /// Equal to the id of this process.
    OwnPid,
}

/// Reasons for which the list could not be put in force.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The list does not translate into a filter, or the kernel rejects the filter.
    #[error("{0}")]
    Filter(#[from] seccompiler::Error),
    /// A row of the list is malformed, or the processor is not supported.
    #[error("{0}")]
    Backend(#[from] seccompiler::BackendError),
}

/// Builds a row for the processes whose bits are in `who`.
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

static TRAP_DENIED: OnceLock<()> = OnceLock::new();

/// Makes a denied call raise `SIGSYS` instead of an error, in all processes that enforce the list
/// later. Tests use this to find calls that the list lacks. Calls that are refused on purpose still
/// fail with an error.
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub fn trap_denied_calls() {
    let _ = TRAP_DENIED.set(());
}

/// Puts the list in force for all threads of this process.
///
/// # Errors
///
/// [`FilterError`]; then no filter is in force, or only those for calls that are refused on
/// purpose.
pub fn enforce(whom: Confined) -> Result<(), FilterError> {
    // Translate all filters first: once one is in force, translation lacks system calls.
    let programs = programs(whom, TRAP_DENIED.get().is_some())?;
    // Each filter allows the calls that install the next one. TSYNC applies it to all threads.
    for program in &programs {
        seccompiler::apply_filter_all_threads(program)?;
    }
    Ok(())
}

/// Builds the filters, the list's last. The kernel takes the strictest answer of all filters.
fn programs(whom: Confined, trap: bool) -> Result<Vec<BpfProgram>, FilterError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let refuse = |rules, errno: i32| {
        let answer = SeccompAction::Errno(errno.cast_unsigned());
        BpfProgram::try_from(SeccompFilter::new(rules, SeccompAction::Allow, answer, arch)?)
    };
    let mut programs = vec![refuse([(libc::SYS_clone3, Vec::new())].into(), libc::ENOSYS)?];
    let mut allowed = rules(LIST, whom)?;
    let mut otherwise = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    if trap {
        let refused = rules(REFUSED, whom)?;
        programs.push(refuse(refused.clone(), libc::EPERM)?);
        // The filter just built answers these calls.
        allowed.extend(refused);
        otherwise = SeccompAction::Trap;
    }
    let list = SeccompFilter::new(allowed, otherwise, SeccompAction::Allow, arch)?;
    programs.push(list.try_into()?);
    Ok(programs)
}

/// Converts a list for `seccompiler`, in which an empty vector means "any arguments".
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
    fn no_call_is_both_unconditional_and_conditional() {
        for bit in [DRIVER, FRONTEND, UPLINK, DAEMON, DISK, PROXY, CARD, SHIELD] {
            let rows = || LIST.iter().filter(|row| row.who & bit != 0);
            for row in rows() {
                let of_call = || rows().filter(|other| other.number == row.number);
                let free = of_call().filter(|other| other.when.is_empty()).count();
                assert!(free == 0 || of_call().count() == 1, "call {} of {bit}", row.number);
            }
        }
    }

    #[test]
    fn list_translates_for_every_process() {
        let domain = Confined::Domain;
        let domains = DomainKind::ALL.into_iter().filter(|kind| kind.is_sandboxed()).map(domain);
        for whom in domains.chain([Confined::Daemon]) {
            let rules = rules(LIST, whom).unwrap();
            let flushes = matches!(
                whom,
                Confined::Domain(DomainKind::Driver | DomainKind::Disk) | Confined::Daemon
            );
            assert_eq!(rules.contains_key(&libc::SYS_fdatasync), flushes);
            assert_eq!(rules.contains_key(&libc::SYS_openat), whom == Confined::Daemon);
            // Uplinks connect to hosts for a guest, daemons to the servers of disks.
            let connects = matches!(whom, Confined::Domain(DomainKind::Uplink) | Confined::Daemon);
            assert_eq!(rules.contains_key(&libc::SYS_connect), connects);
            for trap in [false, true] {
                for program in programs(whom, trap).unwrap() {
                    // The kernel's limit is 4096 instructions.
                    assert!(program.len() < 1000, "{}", program.len());
                }
            }
        }
    }
}
