//! Values of the status: counters that are not zero, and xenbus states.

use ringfence_wire::xenbus::{self, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::status::Counts;

/// Returns the counters that are not zero.
pub(super) fn counts(all: impl IntoIterator<Item = (&'static str, u64)>) -> Counts {
    let some = all.into_iter().filter(|(_, count)| *count > 0);
    some.map(|(name, count)| (name.to_owned(), count)).collect()
}

/// Returns the state in a device's directory. `None` if there is no such directory.
pub(super) fn state_of(store: &mut StoreClient, directory: &str) -> Option<XenbusState> {
    let text = store.read_opt(&format!("{directory}/{}", xenbus::STATE)).ok()??;
    Some(XenbusState::parse(&text).unwrap_or(XenbusState::Missing))
}

/// Returns the name of a state for the status.
pub(super) fn state_name(state: Option<XenbusState>) -> String {
    state.map_or_else(|| "none".to_owned(), |state| format!("{state:?}"))
}
