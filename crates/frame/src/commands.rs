//! What the control side of a device orders of its port.

use std::sync::Arc;

use ringfence_access::index::EnterError;
use ringfence_access::staging::StagedPage;
use ringfence_access::window::SourceLevels;
use ringfence_wire::grant::Gref;

use crate::rate::Rate;
use crate::steer::Steering;

/// An order, carried out between two rounds.
pub enum PortCommand {
    /// Reach these pages through the table from now on.
    Stage(Vec<StagedPage>),
    /// Reach these pages through the table no longer; hand them back.
    Unstage(Vec<Gref>),
    /// Hash packets to the guest like this, and say so on the ring; `None`: do not.
    Hash(Option<Arc<Steering>>),
    /// What the store says of the guest's behaviour over time; answered with [`PortReply::PolicySet`].
    SetPolicy(PortPolicy),
    /// To a frontend: so many of its pages are staged; answered with [`PortReply::Staged`].
    SendStaged(TxStaging),
    /// To a frontend: keep at most so many pages of each of its windows from now on; answered with
    /// [`PortReply::Resized`].
    Resize(u32),
}

/// What became of an order.
pub enum PortReply {
    /// [`PortCommand::Stage`] or [`PortCommand::SendStaged`] was carried out.
    Staged,
    /// It was not, and the pages are handed back.
    NotStaged(Vec<StagedPage>, EnterError),
    /// The pages that were in the table, and are not any more.
    Unstaged(Vec<StagedPage>),
    /// [`PortCommand::SetPolicy`] was carried out.
    PolicySet,
    /// [`PortCommand::Hash`] was carried out.
    Hashing,
    /// [`PortCommand::Resize`] was carried out: what is in the windows of that queue now.
    Resized(SourceLevels),
    /// The port has no use for such an order.
    Unsupported,
}

/// What is wanted of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortPolicy {
    /// How much the guest may send; `None` is without limit.
    pub rate: Option<Rate>,
    /// Whether the guest wants only those multicast frames that it asked for.
    pub multicast_control: bool,
}

/// What is used of the pages that the backend keeps mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TxStaging {
    /// None are known to be: each slot has a page to itself.
    #[default]
    Off,
    /// All are: what is short goes to places of 256 bytes in few pages, the rest to pages of its own.
    Full,
    /// The few pages are: the first 256 bytes of each packet go there, the rest to pages that the
    /// backend copies or maps each time.
    Heads,
}

impl TxStaging {
    /// Those that can be asked for.
    pub const CHOICES: [TxStaging; 2] = [TxStaging::Full, TxStaging::Heads];

    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TxStaging::Off => "off",
            TxStaging::Full => "full",
            TxStaging::Heads => "header",
        }
    }

    /// What it means, in a line for people.
    pub fn meaning(self) -> &'static str {
        match self {
            TxStaging::Off => "no page stays mapped",
            TxStaging::Full => "all pages of the rings stay mapped",
            TxStaging::Heads => {
                "of what is sent, 16 pages a ring for the first 256 bytes of each packet"
            }
        }
    }
}

impl core::fmt::Display for TxStaging {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no way of staging.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no way of staging; there are full and header")]
pub struct UnknownStaging(String);

impl core::str::FromStr for TxStaging {
    type Err = UnknownStaging;

    fn from_str(word: &str) -> Result<TxStaging, UnknownStaging> {
        let all = [TxStaging::Off, TxStaging::Full, TxStaging::Heads];
        let found = all.into_iter().find(|staging| staging.name() == word);
        found.ok_or_else(|| UnknownStaging(word.chars().take(32).collect()))
    }
}
