//! Datagrams of a UDP association under an egress policy: those of QUIC wait for the verdict on their hello.
//!
//! All datagrams of the association are read, because each can begin another QUIC connection with another name.
//! Only datagrams with a long header cost more than a look at one byte.

use core::net::SocketAddr;
use core::time::Duration;
use std::sync::Arc;

use ringfence_policy::Protocol;
use ringfence_policy::first::Shown;
use ringfence_policy::gate::Inspection;
use ringfence_policy::quic::{Client, Seen};

use super::{Admitted, Egress, FIRST_BYTES_HELD_MAX, FIRST_BYTES_WITHIN};

/// Maximum number of bytes of an association that wait for a verdict. Datagrams beyond it are lost.
const HELD_MAX: usize = 32 << 10;

/// Next step for a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatagramVerdict {
    /// Datagrams that waited, then this one, may go to the server.
    Pass,
    Wait,
    Drop,
    Deny,
}

/// Inspection of the datagrams that the guest sends in one association.
#[derive(Debug)]
pub struct DatagramInspector {
    egress: Arc<Egress>,
    to: SocketAddr,
    admitted: Admitted,
    client: Client,
    held: Vec<Vec<u8>>,
    /// Number of bytes counted in the limit of all associations.
    counted: usize,
    /// Time at which the hellos must be complete.
    until: Option<Duration>,
    /// Set once the hello of a connection was allowed.
    has_passed: bool,
    /// Verdict on datagrams that are no QUIC.
    other: Option<bool>,
    /// Time of the last call.
    now: Duration,
}

impl DatagramInspector {
    /// Prepares the inspection of an association. Returns `None` if it needs none.
    pub fn new(
        egress: &Arc<Egress>,
        to: SocketAddr,
        admitted: impl Into<Admitted>,
    ) -> Option<Box<DatagramInspector>> {
        let admitted = admitted.into();
        (admitted.decision.inspection != Inspection::None).then(|| {
            Box::new(DatagramInspector {
                egress: Arc::clone(egress),
                to,
                admitted,
                client: Client::default(),
                held: Vec::new(),
                counted: 0,
                until: None,
                has_passed: false,
                other: None,
                now: Duration::ZERO,
            })
        })
    }

    /// Returns the time at which [`DatagramInspector::expire`] must be called.
    pub fn deadline(&self) -> Option<Duration> {
        self.until
    }

    /// Returns `true` if datagrams have passed.
    pub fn is_open(&self) -> bool {
        self.has_passed || self.other == Some(true)
    }

    /// Decides on the next datagram of the guest.
    pub fn judge(&mut self, bytes: &[u8], now: Duration) -> DatagramVerdict {
        self.now = now;
        let seen = self.client.read(bytes, now);
        let mut verdict = self.verdict(seen);
        if verdict == DatagramVerdict::Wait {
            self.until = self.until.or(Some(now + FIRST_BYTES_WITHIN));
            let held: usize = self.held.iter().map(Vec::len).sum();
            if held + bytes.len() > HELD_MAX {
                verdict = DatagramVerdict::Drop;
            } else {
                self.held.push(bytes.to_vec());
            }
        } else if !self.client.is_waiting() {
            self.until = None;
        }
        if !self.count() {
            self.forget();
            return DatagramVerdict::Deny;
        }
        verdict
    }

    fn verdict(&mut self, seen: Seen) -> DatagramVerdict {
        let is_waiting = self.client.is_waiting();
        match seen {
            Seen::Other if self.has_passed => DatagramVerdict::Pass,
            Seen::Other | Seen::Known if is_waiting => DatagramVerdict::Wait,
            Seen::Other => {
                let is_allowed = match self.other {
                    Some(is_allowed) => is_allowed,
                    None => self.check(&Shown::Unknown),
                };
                self.other = Some(is_allowed);
                pass_if(is_allowed)
            }
            Seen::Known => DatagramVerdict::Pass,
            Seen::Incomplete => DatagramVerdict::Wait,
            Seen::OtherVersion => pass_if(self.check(&Shown::OtherQuic)),
            Seen::Unreadable if self.has_passed || is_waiting => DatagramVerdict::Drop,
            Seen::Unreadable => pass_if(self.check(&Shown::Malformed)),
            Seen::Malformed => {
                self.client.refuse_last();
                self.held.clear();
                pass_if(self.check(&Shown::Malformed))
            }
            Seen::Hello(hello) => {
                if !self.check(&Shown::Tls(hello)) {
                    self.client.refuse_last();
                    self.held.clear();
                    return DatagramVerdict::Deny;
                }
                self.has_passed = true;
                if is_waiting { DatagramVerdict::Wait } else { DatagramVerdict::Pass }
            }
        }
    }

    fn check(&self, shown: &Shown) -> bool {
        self.egress.check(self.to, Protocol::Udp, &self.admitted, shown, self.now)
    }

    /// Removes the datagrams that waited. There is none while a hello is not complete.
    pub fn take_held(&mut self) -> Vec<Vec<u8>> {
        if self.client.is_waiting() {
            return Vec::new();
        }
        let held = core::mem::take(&mut self.held);
        self.count();
        held
    }

    /// Refuses hellos that are not complete in time. Returns `true` if there are any.
    pub fn expire(&mut self, now: Duration) -> bool {
        let is_over = self.until.is_some_and(|until| until <= now);
        if is_over {
            self.now = now;
            self.check(&Shown::Malformed);
            self.forget();
        }
        is_over
    }

    fn forget(&mut self) {
        self.client.refuse_waiting();
        self.held.clear();
        self.until = None;
        self.count();
    }

    /// Updates the number of bytes that all associations keep. Returns `false` if it exceeds the limit.
    fn count(&mut self) -> bool {
        let held: usize = self.held.iter().map(Vec::len).sum();
        let bytes = held + self.client.memory();
        if bytes != self.counted {
            let mut state = self.egress.state();
            state.waiting = state.waiting - self.counted + bytes;
            self.counted = bytes;
            return state.waiting <= FIRST_BYTES_HELD_MAX;
        }
        true
    }
}

fn pass_if(is_allowed: bool) -> DatagramVerdict {
    if is_allowed { DatagramVerdict::Pass } else { DatagramVerdict::Deny }
}

impl Drop for DatagramInspector {
    fn drop(&mut self) {
        self.egress.state().waiting -= self.counted;
    }
}

#[cfg(test)]
pub(super) mod tests;
