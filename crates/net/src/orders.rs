//! What the control side of a device orders of its port.

use std::sync::Arc;

use ringfence_access::index::EnterError;
use ringfence_access::staging::StagedPage;
use ringfence_access::window::SourceLevels;
use ringfence_platform::Gref;

use crate::netfront::TxStaging;
use crate::steer::Steering;
use crate::vif::controls::Wanted;

/// An order, carried out between two rounds.
pub enum PortOrder {
    /// Reach these pages through the table from now on.
    Stage(Vec<StagedPage>),
    /// Reach these pages through the table no longer; hand them back.
    Unstage(Vec<Gref>),
    /// Hash packets to the guest like this, and say so on the ring; `None`: do not.
    Hash(Option<Arc<Steering>>),
    /// What the store says of the guest's behaviour over time; answered with [`PortReply::Following`].
    Follow(Wanted),
    /// To a frontend: so many of its pages are staged; answered with [`PortReply::Staged`].
    SendStaged(TxStaging),
    /// To a frontend: keep at most so many pages of each of its windows from now on; answered with
    /// [`PortReply::Resized`].
    Resize(u32),
}

/// What became of an order.
pub enum PortReply {
    /// [`PortOrder::Stage`] or [`PortOrder::SendStaged`] was carried out.
    Staged,
    /// It was not, and the pages are handed back.
    NotStaged(Vec<StagedPage>, EnterError),
    /// The pages that were in the table, and are not any more.
    Unstaged(Vec<StagedPage>),
    /// [`PortOrder::Follow`] was carried out.
    Following,
    /// [`PortOrder::Hash`] was carried out.
    Hashing,
    /// [`PortOrder::Resize`] was carried out: what is in the windows of that queue now.
    Resized(SourceLevels),
    /// The port has no use for such an order.
    Unsupported,
}
