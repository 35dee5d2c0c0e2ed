//! Changes of the egress policy and the name servers, which the engines of a guest share.

use core::time::Duration;

use ringfence_policy::Policy;

use super::Uplink;
use crate::config::NameServers;
use crate::egress::NoteQueue;
use crate::share::{Handoff, Share};

impl Uplink {
    /// Replaces the guest's egress policy in all of its engines, and closes the flows that the new one denies. The
    /// other engines follow before their next frame or event.
    /// `notes` is for the records of a guest that had no policy.
    pub fn set_policy(&mut self, policy: Policy, notes: Option<NoteQueue>, now: Duration) {
        self.config.policy.set(policy, notes);
        self.follow_changes(now);
        self.wake_others();
    }

    /// Replaces the guest's name servers in all of its engines. Associations with servers of the past end.
    pub fn set_name_servers(&mut self, servers: NameServers, now: Duration) {
        self.config.name_servers.publish(servers);
        self.follow_changes(now);
        self.wake_others();
    }

    /// Wakes the guest's other engines, which then read the shared values.
    pub(super) fn wake_others(&mut self) {
        let Share { index, of, .. } = self.config.share;
        let others = (0..of).filter(|&other| other != index);
        self.handoffs.extend(others.map(|other| (other, Handoff::Wake)));
    }

    /// Reads the egress policy and the name servers again if they have changed.
    pub(super) fn follow_changes(&mut self, now: Duration) {
        if self.config.name_servers.is_newer_than(self.servers_version) {
            let (version, servers) = self.config.name_servers.read();
            self.servers_version = version;
            self.config.access.resolvers = servers.resolvers;
            self.config.access.name_servers = [&servers.offered[..], &servers.unoffered].concat();
            self.config.guest.name_servers = servers.offered;
            self.close_forbidden(now);
        }
        if self.config.policy.is_newer_than(self.policy_version) {
            (self.policy_version, self.egress) = self.config.policy.read();
            self.close_forbidden(now);
        }
        self.follow_answers(now);
    }
}
