//! Confinement of the daemons `ringfence serve` and `ringfence attach`.
//!
//! These are no domains: they run in a domain of Xen, and the hypervisor separates that from the
//! others. They still process bytes of guests, so they give up all rights that they do not use:
//!
//! * Capabilities: only those named by the caller remain, and none can be gained (no new
//!   privileges).
//! * Tracing: no core file, which would contain guests' packets, and no tracing by the same user.
//! * Files: only those of the [`View`], if the process may mount. The sockets of service managers
//!   and container engines are not among them.
//! * Network: no abstract Unix sockets of the host, and no TCP except as requested, if the kernel
//!   has Landlock.
//! * System calls: the seccomp list, which allows opening devices as guests come and go.

use rustix::thread::CapabilitySet;

use super::landlock::Sockets;
use super::syscalls::{self, Confined};
use super::{SandboxError, View, stage, view};

/// Proof that the first stage is complete.
#[derive(Debug)]
pub struct Confinement(());

impl Confinement {
    /// First stage: gives up rights. The process must have one thread. Whatever it opens
    /// afterwards, it opens without these rights.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process must exit.
    pub fn enter(
        keep: CapabilitySet,
        files: &View,
        sockets: Sockets,
    ) -> Result<Confinement, SandboxError> {
        stage("core file limit", super::no_core_files())?;
        files.enter()?;
        let reachable = view::privileged_sockets();
        if rustix::process::geteuid().is_root() && !reachable.is_empty() {
            tracing::warn!(
                ?reachable,
                "these sockets of the host can be reached from here, and make whoever takes this process \
                 over root again: start it with CAP_SYS_ADMIN, which it gives up, or have its unit hide \
                 them (InaccessiblePaths)"
            );
        }
        if rustix::thread::capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
            stage("capabilities", super::drop_capabilities(keep))?;
            super::check_capabilities(keep)?;
        } else {
            // An ordinary user, or few capabilities left by a service manager: none can be gained
            // either way.
            stage("capabilities", super::keep_capabilities(keep))?;
        }
        stage("no new privileges", Ok(rustix::thread::set_no_new_privs(true)?))?;
        stage("Landlock", sockets.restrict())?;
        stage("not dumpable", super::not_dumpable())?;
        Ok(Confinement(()))
    }

    /// Second stage: puts the seccomp list in force for all threads, permanently.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process must exit.
    pub fn lock(self) -> Result<(), SandboxError> {
        Ok(syscalls::enforce(Confined::Daemon)?)
    }
}
