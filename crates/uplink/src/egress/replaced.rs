//! Open flows when the policy was replaced, or the host's addresses have changed.

use core::net::SocketAddr;
use core::time::Duration;

use ringfence_policy::gate::{Decision, Inspection};
use ringfence_policy::{Action, Cause, HostName, Protocol, Verdict};

use super::Egress;
use super::open_flow::OpenFlow;

impl Egress {
    /// Decides on an open flow by the policy in force. Returns `None` if it must end.
    pub fn decide_again(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        flow: &OpenFlow<'_>,
        now: Duration,
    ) -> Option<Decision> {
        let name = parse(flow.shown.or(flow.name));
        let decide = || self.state().gate.decide_again(to, protocol, name.as_ref(), flow.read, now);
        if self.learns { Some(all(name)) } else { decide() }
    }

    /// Decides on an open connection to a name at the upstream proxy by the policy in force. Returns `None` if it must end.
    pub(crate) fn decide_again_on_name(
        &self,
        name: &str,
        port: u16,
        flow: &OpenFlow<'_>,
    ) -> Option<Decision> {
        let name = parse(Some(name))?;
        if self.learns {
            return Some(all(Some(name)));
        }
        let state = self.state();
        // The proxy connects to the first name, and the second one is that of the hello.
        if let Some(shown) = parse(flow.shown) {
            state.gate.decide_again_on_name(&shown, port, flow.read)?;
        }
        state.gate.decide_again_on_name(&name, port, flow.read)
    }
}

fn parse(name: Option<&str>) -> Option<HostName> {
    HostName::parse(name?).ok()
}

/// Returns the decision on a flow of a guest whose policy is learned.
fn all(name: Option<HostName>) -> Decision {
    let verdict = Verdict { action: Action::Allow, cause: Cause::NoRule };
    Decision { verdict, name, inspection: Inspection::DeniedNames }
}
