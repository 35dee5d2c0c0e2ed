//! The xenbus handshake as pure decisions: what each side does when it looks at the other's state.
//!
//! Nothing here depends on *changes* being seen: a side looks at both states and at what it holds,
//! and does the one step that is due. Repeated, skipped, reordered and unknown states are
//! therefore no special cases (XSA-350, XSA-374, XSA-465): the same look answers the same, and a
//! step that was done is not due again.

use ringfence_wire::xenbus::XenbusState;

/// What a backend does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendStep {
    /// Nothing is due.
    Wait,
    /// Publish features and go to InitWait.
    Announce,
    /// Read the frontend's keys, map, bind, go to Connected. When this side is Connected already, a
    /// backend before it was: its device is taken over, and no state changes.
    Connect,
    /// Let go of everything and go to Closing.
    Close,
    /// Let go of everything and go to Closed.
    Finish,
    /// The device is gone for good: let go of everything and forget it.
    Forget,
}

/// What a backend has of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackendView {
    /// Its own state in the store.
    pub own: XenbusState,
    /// The frontend's state; `None` when the key is not there.
    pub peer: Option<XenbusState>,
    /// Whether rings are mapped.
    pub attached: bool,
    /// The toolstack's `online`: a closed device may come back.
    pub online: bool,
    /// This side gave the device up because the frontend broke a rule.
    pub penalized: bool,
}

/// The step that is due.
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
        // A penalized frontend may start over; until it does, the device stays closed.
        S::Initialising if view.attached || (leaving && view.online) => BackendStep::Announce,
        S::Initialising | S::InitWait if view.own == S::Initialising => BackendStep::Announce,
        // The backend before this one left a device in use; the frontend has started over since.
        S::Initialising | S::InitWait if !view.attached && in_use(view.own) => {
            BackendStep::Announce
        }
        // Whatever it says, a penalized frontend is not served (it may say Reconfiguring, or 99).
        S::Closing | S::Closed => closing_step(view, leaving),
        _ if view.penalized => close_if(view, !leaving),
        S::Initialised | S::Connected if leaving => BackendStep::Wait,
        S::Initialised | S::Connected if !view.attached => BackendStep::Connect,
        S::Missing => close_if(view, !leaving),
        _ => BackendStep::Wait,
    }
}

/// Whether a backend in this state holds, or held, a frontend's rings.
fn in_use(own: XenbusState) -> bool {
    use XenbusState as S;
    matches!(own, S::Initialised | S::Connected | S::Reconfiguring | S::Reconfigured)
}

/// What a backend does whose frontend leaves or has left.
fn closing_step(view: BackendView, leaving: bool) -> BackendStep {
    use XenbusState as S;
    match (view.peer, view.own) {
        (Some(S::Closing), _) => close_if(view, !leaving),
        _ if !view.online => BackendStep::Forget,
        // A new backend: the frontend left the one before it, and may have this one.
        (_, S::Initialising) => BackendStep::Announce,
        (_, S::Closed | S::InitWait) if !view.attached => BackendStep::Wait,
        _ => BackendStep::Finish,
    }
}

fn close_if(view: BackendView, due: bool) -> BackendStep {
    if due || view.attached { BackendStep::Close } else { BackendStep::Wait }
}

/// What a frontend does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrontendStep {
    /// Nothing is due.
    Wait,
    /// Lend rings, publish keys, go to Connected; or to Initialised, where the frontend of a device
    /// of this kind waits for the backend to be Connected first.
    Connect,
    /// Read what the backend published when it connected, go to Connected.
    Complete,
    /// Start over: let go of everything, go to Initialising.
    Restart,
    /// Let go of everything and go to Closed.
    Finish,
}

/// What a frontend has of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrontendView {
    /// Its own state in the store.
    pub own: XenbusState,
    /// The backend's state; `None` when the key is not there.
    pub peer: Option<XenbusState>,
    /// Whether rings are lent and the data path runs.
    pub attached: bool,
    /// The backend was seen Connected since the rings were lent.
    pub was_up: bool,
    /// The data path ended (the other end of the channel is gone, or the backend broke a rule).
    pub broken: bool,
}

/// The step that is due.
pub fn frontend_step(view: FrontendView) -> FrontendStep {
    use XenbusState as S;
    match view.peer {
        // Both directories were taken away: there is nothing to write into.
        None if view.own == S::Missing && !view.attached => FrontendStep::Wait,
        None | Some(S::Closing | S::Closed) if view.own != S::Closed || view.attached => {
            FrontendStep::Finish
        }
        // A backend that was connected waits for us to begin: a new one took over. Or our state was
        // set back, by a toolstack or because it could not be written. Or it offers the device
        // again after it was closed.
        Some(S::InitWait)
            if view.attached && (view.was_up || view.broken || view.own == S::Initialising) =>
        {
            FrontendStep::Restart
        }
        Some(S::InitWait) if !view.attached && view.own != S::Initialising => FrontendStep::Restart,
        Some(S::InitWait) if !view.attached => FrontendStep::Connect,
        Some(S::Initialising) if view.attached => FrontendStep::Restart,
        // A backend that skipped InitWait offers its defaults.
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
