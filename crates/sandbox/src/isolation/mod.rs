//! Isolation of an inner process: the stages by which it confines itself.
//!
//! On the `local` platform these stages replace the hypervisor, so all of them are required. A
//! domain that can re-open `/proc/self/fd/N` makes a read-only arena writable. A domain that can
//! call `process_vm_readv` needs no arena at all. A domain with `MADV_COLLAPSE` keeps pages that
//! were revoked.
//!
//! # Stages
//!
//! The supervisor ([`super::supervisor`]) has created the user and PID namespaces. The inner
//! process then runs these stages in order. Each stage needs rights that a later one gives up.
//!
//! 1. [`Isolation::enter`]: takes its own ids. Unshares the mount, network, IPC and UTS namespaces
//!    (an uplink keeps the network). Replaces the root by an empty read-only directory. Drops all
//!    capabilities, also from the bounding and ambient sets, with locked securebits. Sets no new
//!    privileges. An uplink denies itself files by Landlock, if the kernel has it. Not dumpable, no
//!    core files.
//! 2. The caller makes what needs a system call that stage 3 denies, such as arenas
//!    (`memfd_create`). It has not read any bytes of a peer yet.
//! 3. [`Isolation::lock`]: puts the seccomp list ([`syscalls`]) in force on all threads. Only then
//!    does the process read from peers.
//!
//! Processes that an ordinary user starts share that user's id. They are separated all the same: a
//! process of another PID namespace has no number here. Tracing needs capabilities over the user
//! namespace *in which the target was started*, which is a sibling's. The seccomp list denies the
//! system calls.

mod daemon;
mod landlock;
mod list;
pub mod syscalls;
mod terminal;
mod view;

pub use daemon::Confinement;
pub use landlock::Sockets;
pub use terminal::deny_terminal_input;
pub use view::View;

use std::io;

use ringfence_sys::namespaces::{self, Fresh};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid};

use super::die_with_parent;
use super::spawn::DomainKind;

/// Mount point of the new root. `/proc` exists on every system, since this program was started
/// through it.
const MOUNT_POINT: &str = "/proc";

/// Reasons for which a process could not be confined. The process must exit.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("sandbox: {stage}: {source}")]
    Stage { stage: &'static str, source: io::Error },
    /// Descriptors are open that the caller did not list.
    #[error("sandbox: descriptors {0:?} were inherited by mistake")]
    SurplusDescriptors(Vec<i32>),
    /// Capabilities are left after all were dropped.
    #[error("sandbox: capabilities {0:#x} are left")]
    CapabilitiesLeft(u64),
    /// The process has more than one thread.
    #[error("sandbox: {0} threads in place of 1")]
    SurplusThreads(usize),
    /// The seccomp list could not be put in force.
    #[error("sandbox: system call list: {0}")]
    Syscalls(#[from] syscalls::FilterError),
    /// The supervisor ended in the meantime.
    #[error("sandbox: the supervisor is gone")]
    Orphaned,
}

/// Proof that stage 1 is complete.
#[derive(Debug)]
pub struct Isolation {
    kind: DomainKind,
}

impl Isolation {
    /// Runs stage 1. The process must have one thread, and all capabilities in its user namespace.
    ///
    /// `expected` lists the descriptors above 2 that are open on purpose.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process must exit.
    pub fn enter(kind: DomainKind, expected: &[i32]) -> Result<Isolation, SandboxError> {
        refuse_surplus_descriptors(expected)?;
        refuse_surplus_threads()?;
        stage("core file limit", no_core_files())?;
        stage("own ids", take_own_ids())?;
        // An uplink opens sockets in the network namespace in which it was started.
        let fresh = match kind {
            DomainKind::Uplink => Fresh::MountIpcUts,
            _ => Fresh::MountNetIpcUts,
        };
        stage("namespaces", namespaces::unshare(fresh))?;
        stage("empty root", empty_root())?;
        stage("capabilities", drop_capabilities(CapabilitySet::empty()))?;
        stage("no new privileges", Ok(rustix::thread::set_no_new_privs(true)?))?;
        if kind == DomainKind::Uplink {
            // Best effort: older kernels have no Landlock.
            stage("Landlock", landlock::no_files())?;
        }
        stage("not dumpable", not_dumpable())?;
        stage("death signal", die_with_parent())?;
        check_capabilities(CapabilitySet::empty())?;
        if is_orphan() {
            return Err(SandboxError::Orphaned);
        }
        Ok(Isolation { kind })
    }

    /// Runs stage 3: puts the seccomp list in force for all threads, permanently.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process must exit.
    pub fn lock(self) -> Result<(), SandboxError> {
        Ok(syscalls::enforce(syscalls::Confined::Domain(self.kind))?)
    }
}

fn stage<T>(stage: &'static str, result: io::Result<T>) -> Result<T, SandboxError> {
    result.map_err(|source| SandboxError::Stage { stage, source })
}

impl From<rustix::io::Errno> for SandboxError {
    fn from(errno: rustix::io::Errno) -> SandboxError {
        SandboxError::Stage { stage: "system call", source: errno.into() }
    }
}

fn refuse_surplus_descriptors(expected: &[i32]) -> Result<(), SandboxError> {
    let listing = stage(
        "list of descriptors",
        rustix::fs::open(
            "/proc/self/fd",
            rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .map_err(Into::into),
    )?;
    let own = std::os::fd::AsRawFd::as_raw_fd(&listing);
    let mut surplus = Vec::new();
    for entry in rustix::fs::Dir::read_from(&listing)? {
        let fd = entry?.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok());
        // "." and ".." do not parse as numbers. The directory stream has a descriptor of its own.
        let Some(fd) = fd.filter(|fd| *fd > 2 && *fd != own && !expected.contains(fd)) else {
            continue;
        };
        surplus.push(fd);
    }
    // Descriptors that were open only while the directory was read are closed by now.
    drop(listing);
    surplus.retain(|fd| std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok());
    if surplus.is_empty() { Ok(()) } else { Err(SandboxError::SurplusDescriptors(surplus)) }
}

/// Fails if a second thread exists, which would keep its capabilities and namespaces.
fn refuse_surplus_threads() -> Result<(), SandboxError> {
    let threads = stage("list of threads", std::fs::read_dir("/proc/self/task"))?.count();
    if threads == 1 { Ok(()) } else { Err(SandboxError::SurplusThreads(threads)) }
}

fn no_core_files() -> io::Result<()> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    Ok(rustix::process::setrlimit(Resource::Core, none)?)
}

/// Switches to id 0, the only one in this user namespace, unless the process has it already.
fn take_own_ids() -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    Ok(())
}

/// Replaces the whole file tree by an empty read-only directory.
fn empty_root() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let options = c"size=4k,nr_inodes=2,mode=0555";
    rustix::mount::mount("ringfence", MOUNT_POINT, "tmpfs", flags, Some(options))?;
    rustix::process::chdir(MOUNT_POINT)?;
    // With both paths the same, the old root ends up mounted over the new one, and the next call
    // unmounts it (pivot_root(2), "pivot_root(".", ".")").
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    rustix::mount::mount_remount("/", flags | MountFlags::RDONLY, c"")?;
    Ok(())
}

/// Drops all capabilities except `keep` from every set.
fn drop_capabilities(keep: CapabilitySet) -> io::Result<()> {
    use CapabilitiesSecureBits as Bits;
    let locked = Bits::NO_ROOT
        | Bits::NO_ROOT_LOCKED
        | Bits::NO_SETUID_FIXUP
        | Bits::NO_SETUID_FIXUP_LOCKED
        | Bits::KEEP_CAPS_LOCKED
        | Bits::NO_CAP_AMBIENT_RAISE
        | Bits::NO_CAP_AMBIENT_RAISE_LOCKED;
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_capabilities_secure_bits(locked)?;
    for capability in known_capabilities().filter(|capability| !keep.contains(*capability)) {
        rustix::thread::remove_capability_from_bounding_set(capability)?;
    }
    keep_capabilities(keep)
}

/// Reduces the capabilities to `keep`. The process may lack some of these.
fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let keep = rustix::thread::capabilities(None)?.permitted & keep;
    let inheritable = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: keep, permitted: keep, inheritable },
    )?;
    Ok(())
}

/// Iterates over the capabilities of this kernel, which reports an error for numbers above its
/// last.
fn known_capabilities() -> impl Iterator<Item = CapabilitySet> {
    (0..u64::BITS)
        .map(|bit| CapabilitySet::from_bits_retain(1 << bit))
        .take_while(|&capability| rustix::thread::capability_is_in_bounding_set(capability).is_ok())
}

fn check_capabilities(keep: CapabilitySet) -> Result<(), SandboxError> {
    let sets = rustix::thread::capabilities(None)?;
    let mut left = sets.effective | sets.permitted | sets.inheritable;
    for capability in known_capabilities() {
        if rustix::thread::capability_is_in_bounding_set(capability)? {
            left |= capability;
        }
    }
    let left = left.difference(keep);
    if left.is_empty() { Ok(()) } else { Err(SandboxError::CapabilitiesLeft(left.bits())) }
}

fn not_dumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Returns `true` if the supervisor ended before the death signal was set. It holds the other end
/// of standard error.
fn is_orphan() -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let stderr = rustix::stdio::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::ERR)
}
