//! Commands from the control side of a device to its port.

use std::sync::Arc;

use ringfence_access::index::EnterError;
use ringfence_access::staging::StagedPage;
use ringfence_access::window::SourceLevels;
use ringfence_wire::grant::Gref;

use crate::rate::Rate;
use crate::steer::Steering;

/// Command for one queue of a port, executed between two rounds.
pub enum PortCommand {
    /// Adds pages to the queue's staging table.
    Stage(Vec<StagedPage>),
    /// Removes pages from the queue's staging table and returns them.
    Unstage(Vec<Gref>),
    /// Sets the hash of packets to the guest, which the port also reports on the ring; `None` disables it.
    Hash(Option<Arc<Steering>>),
    /// Sets the rate policy and multicast control; answered with [`PortReply::PolicySet`].
    SetPolicy(PortSettings),
    /// Sets the maximum number of bytes behind the Ethernet header; answered with [`PortReply::MtuSet`].
    SetMtu(u16),
    /// Tells a frontend which of its pages are staged; answered with [`PortReply::Staged`].
    SendStaged(TxStaging),
    /// Limits the number of a frontend's pages in each of its grant windows; answered with
    /// [`PortReply::Levels`].
    Resize(u32),
    /// Reads the levels of a frontend's grant windows; answered with [`PortReply::Levels`].
    ReadLevels,
}

/// Result of a command.
pub enum PortReply {
    /// [`PortCommand::Stage`] or [`PortCommand::SendStaged`] succeeded.
    Staged,
    /// Refused [`PortCommand::Stage`], with its pages.
    NotStaged(Vec<StagedPage>, EnterError),
    /// Pages that were removed from the staging table.
    Unstaged(Vec<StagedPage>),
    /// [`PortCommand::SetPolicy`] succeeded.
    PolicySet,
    /// [`PortCommand::SetMtu`] succeeded.
    MtuSet,
    /// [`PortCommand::Hash`] succeeded.
    Hashing,
    /// [`PortCommand::Resize`] or [`PortCommand::ReadLevels`] succeeded: the levels of the queue's grant windows.
    Levels(SourceLevels),
    /// Command that this port does not support.
    Unsupported,
}

/// Limits and filters that the store configures for a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortSettings {
    /// Rate limit for frames from the guest; `None` is unlimited.
    pub rate: Option<Rate>,
    /// Set if the guest receives only the multicast groups that it added.
    pub multicast_control: bool,
}

/// Use of staged pages by a frontend that sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TxStaging {
    /// No staged pages: each slot has a page of its own.
    #[default]
    Off,
    /// All pages are staged. Packets of at most 256 bytes share few pages, the others have their own pages.
    Full,
    /// Only the header pages are staged. The first 256 bytes of each packet go there. The backend copies or
    /// maps the pages with the rest.
    Heads,
}

impl TxStaging {
    /// Modes that a user can select.
    pub const CHOICES: [TxStaging; 2] = [TxStaging::Full, TxStaging::Heads];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TxStaging::Off => "off",
            TxStaging::Full => "full",
            TxStaging::Heads => "header",
        }
    }

    /// Returns a description of one line for users.
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

/// Word that is not the name of a staging mode.
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
