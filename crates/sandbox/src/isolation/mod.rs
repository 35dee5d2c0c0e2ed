//! The box in which a frontend or a driver domain runs.
//!
//! On the `local` platform the sandbox is part of what a hypervisor would do, not an extra: a
//! domain that can re-open `/proc/self/fd/N` turns a read-only arena into a writable one, one that
//! can call `process_vm_readv` needs no arena at all, and one with `MADV_COLLAPSE` keeps what was
//! taken back from it.
//!
//! # Stages
//!
//! The keeper ([`super::supervisor`]) has made the user and PID namespaces. In the inner process, in
//! this order, each stage needing what a later one gives up:
//!
//! 1. [`Isolation::enter`]: own ids, fresh mount, network, IPC and UTS namespaces (an uplink keeps
//!    the network), an empty read-only root, no files by Landlock either where the kernel has it, no capability (bounding and ambient sets too, and locked so), no new
//!    privileges, not dumpable, no core files.
//! 2. The caller makes what needs a system call that stage 3 denies: arenas (`memfd_create`).
//!    Nothing a peer wrote has been read yet.
//! 3. [`Isolation::lock`]: the seccomp list ([`syscalls`]), on all threads. Then peers are heard.
//!
//! A user's processes share that user's id. What keeps them apart then: a process in another PID
//! namespace has no number here, tracing needs capabilities over the *user namespace in which the
//! target was started*, which is a sibling's, and the calls that would do it are denied.

mod daemon;
mod landlock;
mod list;
pub mod syscalls;
mod view;

pub use daemon::Confinement;
pub use landlock::Sockets;
pub use view::View;

use std::io;

use ringfence_sys::namespaces::{self, Fresh};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid};

use super::die_with_parent;
use super::spawn::DomainKind;

/// A directory that is there, whatever the system: this program was started through it.
const MOUNT_POINT: &str = "/proc";

/// Why a process could not be put into its box. It must not go on then.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A stage failed.
    #[error("sandbox: {stage}: {source}")]
    Stage {
        /// Which.
        stage: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Descriptors are open that nobody meant this process to have.
    #[error("sandbox: descriptors {0:?} were inherited by mistake")]
    SurplusDescriptors(Vec<i32>),
    /// Some capability is left.
    #[error("sandbox: capabilities {0:#x} are left")]
    CapabilitiesLeft(u64),
    /// There are threads already.
    #[error("sandbox: {0} threads in place of 1")]
    SurplusThreads(usize),
    /// The list of system calls could not be put in force.
    #[error("sandbox: system call list: {0}")]
    Syscalls(#[from] syscalls::FilterError),
    /// The keeper died meanwhile.
    #[error("sandbox: the keeper is gone")]
    Orphaned,
}

/// Proof that stage 1 is done.
#[derive(Debug)]
pub struct Isolation {
    kind: DomainKind,
}

impl Isolation {
    /// Stage 1. The process must have one thread, and every capability in its user namespace.
    ///
    /// `expected` are the descriptors above 2 that are open on purpose.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process is to end.
    pub fn enter(kind: DomainKind, expected: &[i32]) -> Result<Isolation, SandboxError> {
        refuse_surplus_descriptors(expected)?;
        refuse_surplus_threads()?;
        stage("core file limit", no_core_files())?;
        stage("own ids", take_own_ids())?;
        // The sockets of an uplink are in the network it was started in: that is its purpose.
        let fresh = match kind {
            DomainKind::Uplink => Fresh::MountIpcUts,
            _ => Fresh::MountNetIpcUts,
        };
        stage("namespaces", namespaces::unshare(fresh))?;
        stage("empty root", empty_root())?;
        stage("capabilities", drop_capabilities(CapabilitySet::empty()))?;
        stage("no new privileges", Ok(rustix::thread::set_no_new_privs(true)?))?;
        if kind == DomainKind::Uplink {
            // Best effort: not every kernel has it.
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

    /// Stage 3. From here on the list is in force, for all threads, for good.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process is to end.
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
        // "." and ".." are no numbers. The directory stream has a descriptor of its own.
        let Some(fd) = fd.filter(|fd| *fd > 2 && *fd != own && !expected.contains(fd)) else {
            continue;
        };
        surplus.push(fd);
    }
    // What is open only while the directory is read is not there any more.
    drop(listing);
    surplus.retain(|fd| std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok());
    if surplus.is_empty() { Ok(()) } else { Err(SandboxError::SurplusDescriptors(surplus)) }
}

/// A thread that was started before would keep its capabilities and namespaces.
fn refuse_surplus_threads() -> Result<(), SandboxError> {
    let threads = stage("list of threads", std::fs::read_dir("/proc/self/task"))?.count();
    if threads == 1 { Ok(()) } else { Err(SandboxError::SurplusThreads(threads)) }
}

fn no_core_files() -> io::Result<()> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    Ok(rustix::process::setrlimit(Resource::Core, none)?)
}

/// Becomes the one id that exists in this user namespace, where the keeper is not that already.
fn take_own_ids() -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    Ok(())
}

/// Replaces the whole tree of files by an empty directory that cannot be written to.
fn empty_root() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let options = c"size=4k,nr_inodes=2,mode=0555";
    rustix::mount::mount("ringfence", MOUNT_POINT, "tmpfs", flags, Some(options))?;
    rustix::process::chdir(MOUNT_POINT)?;
    // With both names the same the old root ends up mounted over the new one, where the next
    // call takes it off (pivot_root(2), "pivot_root(".", ".")").
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    rustix::mount::mount_remount("/", flags | MountFlags::RDONLY, c"")?;
    Ok(())
}

/// Drops all but `keep`.
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

/// Has no others than `keep`, of which it may lack some.
fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let keep = rustix::thread::capabilities(None)?.permitted & keep;
    let inheritable = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: keep, permitted: keep, inheritable },
    )?;
    Ok(())
}

/// Every capability that this kernel has; it answers for no number above its last.
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

/// Whether the keeper died before the death signal was asked for: it holds the other end of
/// standard error.
fn is_orphan() -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let stderr = rustix::stdio::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::ERR)
}
