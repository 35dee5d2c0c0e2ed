//! Records of flows that end.

use core::net::SocketAddr;

use ringfence_policy::record::{Event, Record};
use ringfence_policy::{Action, Protocol};

use super::{CarriedBytes, Egress, Note, Recording};

impl Egress {
    /// Records the end of a TCP connection, and a limit as its reason.
    pub fn close(
        &self,
        to: SocketAddr,
        name: Option<String>,
        bytes: CarriedBytes,
        limit: Option<String>,
    ) {
        let verdict = if limit.is_some() { Action::Deny } else { Action::Allow };
        let reason = limit.unwrap_or_else(|| "closed".to_owned());
        let CarriedBytes { from_guest, to_guest } = bytes;
        let (bytes_out, bytes_in) = (Some(from_guest), Some(to_guest));
        let record = self.end_of(to, Protocol::Tcp, name, verdict, reason);
        self.note_end(Record { bytes_out, bytes_in, ..record });
    }

    /// Records the end of a UDP association by a limit.
    pub(crate) fn close_by_limit(&self, to: SocketAddr, limit: String) {
        self.note_end(self.end_of(to, Protocol::Udp, None, Action::Deny, limit));
    }

    fn end_of(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        name: Option<String>,
        verdict: Action,
        reason: String,
    ) -> Record {
        Record {
            event: Event::Close,
            verdict,
            name,
            address: Some(to.ip()),
            port: Some(to.port()),
            protocol: Some(protocol),
            reason,
            allow: None,
            sni: None,
            bytes_out: None,
            bytes_in: None,
        }
    }

    fn note_end(&self, record: Record) {
        let Some(notes) = &self.notes else { return };
        if record.verdict == Action::Allow && self.state().recording == Recording::Denials {
            return;
        }
        let _ = notes.try_send(Some(Note::Verdict { record, learn: None }));
    }
}
