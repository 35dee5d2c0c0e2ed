//! Open flow of the guest, as an egress policy decides on it again.

use ringfence_policy::gate::FirstRead;

/// Facts about an open flow of the guest that decide if it stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenFlow<'a> {
    /// Name for which the policy has allowed it.
    pub name: Option<&'a str>,
    /// Name that its first bytes show, if it is another one.
    pub shown: Option<&'a str>,
    pub read: FirstRead,
}

impl OpenFlow<'_> {
    /// Returns a flow of a protocol that shows no names.
    pub fn nameless() -> Self {
        OpenFlow { read: FirstRead::Nameless, ..OpenFlow::default() }
    }
}
