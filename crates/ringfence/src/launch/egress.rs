//! Denials, verdicts and clients of the egress policy in the launcher ([`PolicyClients`]).
//!
//! [`PolicyClients`]: ringfence_uplink_process::egress::live::PolicyClients

use ringfence_sys::descriptors::Descriptors;
use ringfence_uplink_process::egress::live::{ClientId, PolicyReply, PolicyRequest};

use super::guest_processes::GuestProcesses;
use crate::commands::Reply;

impl GuestProcesses<'_> {
    /// Prints sentences about new denials, and sends verdicts to the clients that watch them.
    pub(super) fn report_denials(&mut self) {
        let Some((uplink, channel)) = self.uplink.with_channel() else { return };
        let sentences = uplink.egress.take_sentences();
        if let Some(clients) = &mut self.clients {
            let (watching, verdicts) = clients.policy.take_verdicts(&mut uplink.egress, channel);
            for reply in verdicts.into_iter().map(Reply::Policy) {
                watching.iter().for_each(|id| clients.reply(*id, &reply));
            }
        }
        let name = self.host_name();
        for sentence in sentences {
            self.reporter.summary(format_args!("guest {name}: {sentence}"));
        }
    }

    /// Handles a request about the policy.
    pub(super) fn serve_policy(&mut self, id: ClientId, request: PolicyRequest, fds: Descriptors) {
        let Some(clients) = &mut self.clients else { return };
        let uplink = self.uplink.with_channel();
        let uplink = uplink.map(|(uplink, channel)| (&mut uplink.egress, channel));
        if let Some(reply) = clients.policy.serve(id, request, fds, uplink) {
            let watches = matches!(reply, PolicyReply::Verdicts(_));
            self.reply(id, &Reply::Policy(reply));
            if watches {
                self.reporter.step("verdicts are watched");
            }
        }
    }

    /// Answers the client whose policy the uplink has applied or refused.
    pub(super) fn policy_is_set(&mut self, error: Option<String>) {
        let (Some(clients), Some((uplink, _))) = (&mut self.clients, self.uplink.with_channel())
        else {
            return;
        };
        if let Some((id, reply)) = clients.policy.policy_is_set(error, &mut uplink.egress) {
            self.reply(id, &Reply::Policy(reply));
        }
    }
}
