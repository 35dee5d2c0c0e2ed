//! The xenbus handshake as pure functions: the next step of each end.
//!
//! A step depends on both states and on what the end holds, never on a *change* of state. So repeated,
//! skipped, reordered and unknown states are no special cases (XSA-350, XSA-374, XSA-465). The same
//! view gives the same step, and a step that was carried out is not due again.

use ringfence_wire::xenbus::XenbusState;

/// Action that the states of both ends require of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendStep {
    /// Nothing is due.
    Wait,
    /// Publish features and enter InitWait.
    Announce,
    /// Read the frontend's keys, map, bind, enter Connected. If the own state is Connected already, a
    /// previous backend set it. Its device is then adopted without a change of state.
    Connect,
    /// Release everything and enter Closing.
    Close,
    /// Release everything and enter Closed.
    Finish,
    /// The device was removed: release everything and forget it.
    Forget,
}

/// State of a device as its backend sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackendView {
    /// Own state in the store.
    pub own: XenbusState,
    /// Frontend's state; `None` if the key is missing.
    pub peer: Option<XenbusState>,
    /// Set while the rings are mapped.
    pub attached: bool,
    /// The toolstack's key `online`: a closed device may connect again.
    pub online: bool,
    /// Set after a rule violation of the frontend, for which this end closes the device.
    pub penalized: bool,
}

/// Returns the step of a backend that is due.
pub fn backend_step(view: BackendView) -> BackendStep {
    use XenbusState as S;
    let Some(peer) = view.peer else {
        return if view.online && view.own == S::Initialising {
            BackendStep::Announce
        } else {
            BackendStep::Forget
        };
    };
    let leaving = matches!(view.own, S::Closing | S::Closed);
    match peer {
        // A penalized frontend may restart; until it does, the device stays closed.
        S::Initialising if view.attached || (leaving && view.online) => BackendStep::Announce,
        S::Initialising | S::InitWait if view.own == S::Initialising => BackendStep::Announce,
        // A previous backend left a device in use, and the frontend has restarted since.
        S::Initialising | S::InitWait if !view.attached && in_use(view.own) => {
            BackendStep::Announce
        }
        // A penalized frontend is not served in any state (Reconfiguring, or 99).
        S::Closing | S::Closed => closing_step(view, leaving),
        _ if view.penalized => close_if(view, !leaving),
        S::Initialised | S::Connected if leaving => BackendStep::Wait,
        S::Initialised | S::Connected if !view.attached => BackendStep::Connect,
        S::Missing => close_if(view, !leaving),
        _ => BackendStep::Wait,
    }
}

/// Returns `true` if a backend in this state maps, or mapped, the rings.
fn in_use(own: XenbusState) -> bool {
    use XenbusState as S;
    matches!(own, S::Initialised | S::Connected | S::Reconfiguring | S::Reconfigured)
}

/// Returns the step of a backend whose frontend is Closing or Closed.
fn closing_step(view: BackendView, leaving: bool) -> BackendStep {
    use XenbusState as S;
    match (view.peer, view.own) {
        (Some(S::Closing), _) => close_if(view, !leaving),
        _ if !view.online => BackendStep::Forget,
        // A new backend: the frontend left the previous one and may connect to this one.
        (_, S::Initialising) => BackendStep::Announce,
        (_, S::Closed | S::InitWait) if !view.attached => BackendStep::Wait,
        _ => BackendStep::Finish,
    }
}

fn close_if(view: BackendView, due: bool) -> BackendStep {
    if due || view.attached { BackendStep::Close } else { BackendStep::Wait }
}

/// Action that the states of both ends require of a frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrontendStep {
    /// Nothing is due.
    Wait,
    /// Lend rings, publish keys, enter Connected; or Initialised, for kinds of devices whose frontend
    /// waits for a Connected backend.
    Connect,
    /// Read the keys that the connected backend published, enter Connected.
    Complete,
    /// Release everything and enter Initialising.
    Restart,
    /// Release everything and enter Closed.
    Finish,
}

/// State of a device as its frontend sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrontendView {
    /// Own state in the store.
    pub own: XenbusState,
    /// Backend's state; `None` if the key is missing.
    pub peer: Option<XenbusState>,
    /// Set while the rings are lent and the data path runs.
    pub attached: bool,
    /// Set if the backend was Connected since the rings were lent.
    pub was_up: bool,
    /// Set after the data path ended: the peer's channel closed, or the backend violated a rule.
    pub broken: bool,
}

/// Returns the step of a frontend that is due.
pub fn frontend_step(view: FrontendView) -> FrontendStep {
    use XenbusState as S;
    match view.peer {
        // Both directories were removed, so no state can be written.
        None if view.own == S::Missing && !view.attached => FrontendStep::Wait,
        None | Some(S::Closing | S::Closed) if view.own != S::Closed || view.attached => {
            FrontendStep::Finish
        }
        // A new backend took over and waits for this end. Or the own state was reset, by a toolstack
        // or by a failed write. Or the backend offers a closed device again.
        Some(S::InitWait)
            if view.attached && (view.was_up || view.broken || view.own == S::Initialising) =>
        {
            FrontendStep::Restart
        }
        Some(S::InitWait) if !view.attached && view.own != S::Initialising => FrontendStep::Restart,
        Some(S::InitWait) if !view.attached => FrontendStep::Connect,
        Some(S::Initialising) if view.attached => FrontendStep::Restart,
        // A backend that skipped InitWait offers the default features.
        Some(S::Initialised | S::Connected)
            if !view.attached && view.own == S::Initialising && !view.broken =>
        {
            FrontendStep::Connect
        }
        Some(S::Initialised | S::Connected) if view.broken && view.attached => FrontendStep::Finish,
        Some(S::Connected) if view.attached && view.own == S::Initialised => FrontendStep::Complete,
        _ => FrontendStep::Wait,
    }
}

#[cfg(any(test, feature = "test-utils"))]
mod world;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub use world::{Keys, World};

#[cfg(test)]
mod tests;
