//! Admission of launchers to the control socket.
//!
//! A connection is admitted if two conditions hold. Its user is the one that started the driver
//! domain. Its first message proves that it comes from the same user namespace
//! ([`crate::proof`]).

use std::io;
use std::os::fd::AsFd;

use ringfence_sys::descriptors::{Descriptors, FileIdentity, identity};
use ringfence_sys::socket::peer_user;

use crate::switchboard::{ToDriver, VERSION};

/// Rule for admission: user and user namespace that a launcher must have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admission {
    user: u32,
    namespace: FileIdentity,
}

impl Admission {
    /// Creates the rule from the user at the other end of `channel` and from the user namespace
    /// `namespace`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub(super) fn new(channel: impl AsFd, namespace: impl AsFd) -> io::Result<Admission> {
        Ok(Admission { user: peer_user(channel)?, namespace: identity(namespace)? })
    }

    /// Creates the rule from this process's user and user namespace, for a switch without a sandbox.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn own() -> io::Result<Admission> {
        let namespace = identity(crate::proof::own_user_namespace()?)?;
        Ok(Admission { user: rustix::process::geteuid().as_raw(), namespace })
    }

    /// Returns `true` if the connection's user may use the switch. Under root, launcher and driver
    /// domain have different users. Each sees the other as the overflow user, so the comparison
    /// holds.
    pub(super) fn is_own_user(&self, connection: impl AsFd) -> bool {
        peer_user(connection).is_ok_and(|peer| peer == self.user)
    }

    /// Validates the first message of a connection.
    ///
    /// # Errors
    ///
    /// Returns a text for the user of the launcher.
    pub(super) fn check(&self, message: &ToDriver, fds: &Descriptors) -> Result<(), String> {
        let ToDriver::Hello { version } = message else {
            return Err("the first message is not a launcher's".to_owned());
        };
        if *version != VERSION {
            return Err(format!(
                "the switch is served by Ringfence {VERSION}, this is {version}; use another --switch"
            ));
        }
        // The proof stays among the descriptors, which are disposed of.
        let proof = fds.each().next().filter(|_| fds.len() == 1);
        if proof.is_some_and(|proof| identity(proof) == Ok(self.namespace)) {
            return Ok(());
        }
        Err("it belongs to another user namespace than this command; use another --switch"
            .to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::proof::own_user_namespace;

    fn hello() -> ToDriver {
        ToDriver::Hello { version: VERSION.to_owned() }
    }

    fn of(fd: OwnedFd) -> Descriptors {
        vec![fd].into()
    }

    #[test]
    fn own_user_namespace_is_admitted() {
        let admission = Admission::own().unwrap();
        assert_eq!(admission.check(&hello(), &of(own_user_namespace().unwrap())), Ok(()));
    }

    #[test]
    fn another_file_or_version_or_message_is_refused() {
        let admission = Admission::own().unwrap();
        let other: OwnedFd = std::fs::File::open("/proc/self/ns/net").unwrap().into();
        assert!(admission.check(&hello(), &of(other)).is_err());
        assert!(admission.check(&hello(), &Descriptors::default()).is_err());
        let proof = || of(own_user_namespace().unwrap());
        assert!(admission.check(&ToDriver::Stats, &proof()).is_err());
        let old = ToDriver::Hello { version: "0".to_owned() };
        let why = admission.check(&old, &proof()).unwrap_err();
        assert!(why.contains("this is 0"), "{why}");
    }
}
