//! The box of `ringfence serve` and `ringfence attach`, which are no domains of their own: what they
//! handle is another domain's, and the hypervisor keeps that apart. Guests' bytes are all the same
//! read by them, so they keep no more of the system than they use:
//!
//! * no capability but those named, none to be had again, no new privileges;
//! * no core file, in which guests' packets would lie, and not to be traced by the same user;
//! * of the host's files only those of their [`View`], where they may mount anything: the sockets of
//!   service managers and container engines are not among them;
//! * no abstract Unix sockets of the host, and no TCP where none is asked for, by Landlock, where the
//!   kernel has it;
//! * the seccomp list, with the calls by which devices are opened as guests come and go.

use rustix::thread::CapabilitySet;

use super::landlock::Sockets;
use super::syscalls::{self, Confined};
use super::{SandboxError, View, stage, view};

/// Proof that the first stage is done.
#[derive(Debug)]
pub struct Confinement(());

impl Confinement {
    /// The first stage; the process must have one thread. What is opened afterwards is opened
    /// without the rights that were given up.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process is to end.
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
            // An ordinary user, or a supervisor left us little: nothing can be had again either way.
            stage("capabilities", super::keep_capabilities(keep))?;
        }
        stage("no new privileges", Ok(rustix::thread::set_no_new_privs(true)?))?;
        stage("Landlock", sockets.restrict())?;
        stage("not dumpable", super::not_dumpable())?;
        Ok(Confinement(()))
    }

    /// The second stage: from here on the list is in force, for all threads, for good.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process is to end.
    pub fn lock(self) -> Result<(), SandboxError> {
        Ok(syscalls::enforce(Confined::Daemon)?)
    }
}
