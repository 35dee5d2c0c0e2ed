//! Names of a connection under an egress policy.

use ringfence_policy::HostName;
use ringfence_policy::gate::FirstRead;

use crate::egress::OpenFlow;

/// Names of a connection, and the state of its first bytes.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Name for which the policy has allowed the connection.
    pub(super) allowed: Option<Box<str>>,
    /// Name that its first bytes show, if it is another one.
    shown: Option<Box<str>>,
    pub(super) read: FirstRead,
}

impl Names {
    /// Keeps the name that first bytes show.
    pub(super) fn note(&mut self, read: FirstRead, shown: Option<HostName>) {
        let shown = shown.map(|name| Box::<str>::from(name.as_str()));
        self.read = read;
        self.shown = shown.filter(|shown| Some(shown) != self.allowed.as_ref());
    }

    /// Returns the facts by which a policy decides on the open connection.
    pub(super) fn flow(&self) -> OpenFlow<'_> {
        let (name, shown) = (self.allowed.as_deref(), self.shown.as_deref());
        OpenFlow { name, shown, read: self.read }
    }
}
