//! Commands from the control side of a vif to its port.
//!
//! They travel inside a [`PortCommand`], which workers pass on unread. So do their answers, inside a [`PortReply`].

use std::sync::Arc;

use ringfence_access::index::EnterError;
use ringfence_access::staging::StagedPage;
use ringfence_access::window::SourceLevels;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_wire::grant::Gref;

use crate::rate::Rate;
use crate::staging::TxStaging;

/// Control side's command to the part of a port that serves one queue.
pub enum VifCommand {
    /// Adds pages to the queue's staging table.
    Stage(Vec<StagedPage>),
    /// Removes pages from the queue's staging table and returns them.
    Unstage(Vec<Gref>),
    /// Tells a frontend which of its pages are staged; answered with [`VifReply::Staged`].
    SendStaged(TxStaging),
    /// Limits the number of a frontend's pages in each of its grant windows; answered with
    /// [`VifReply::Levels`].
    Resize(u32),
    /// Reads the levels of a frontend's grant windows; answered with [`VifReply::Levels`].
    ReadLevels,
    /// Reads the number of a frontend's requests that its backend has not answered; answered with [`VifReply::Unanswered`].
    ReadUnanswered,
}

/// Limits and filters that the store configures for a vif. The command sets them on the whole port, and is answered with
/// [`VifReply::PolicySet`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VifSettings {
    /// Rate limit for frames from the guest; `None` is unlimited.
    pub rate: Option<Rate>,
    /// Set if the guest receives only the multicast groups that it added.
    pub multicast_control: bool,
}

/// Result of a [`VifCommand`] or of [`VifSettings`].
pub enum VifReply {
    /// [`VifCommand::Stage`] or [`VifCommand::SendStaged`] succeeded.
    Staged,
    /// Refused [`VifCommand::Stage`], with its pages.
    NotStaged(Vec<StagedPage>, EnterError),
    /// Pages that were removed from the staging table.
    Unstaged(Vec<StagedPage>),
    /// The settings are in force.
    PolicySet,
    /// [`VifCommand::Resize`] or [`VifCommand::ReadLevels`] succeeded: the levels of the queue's grant windows.
    Levels(SourceLevels),
    /// [`VifCommand::ReadUnanswered`] succeeded: the number of TX requests without a response.
    Unanswered(u32),
}

impl VifCommand {
    /// Takes the vif's command out of a port's command. Returns `None` if it is another one.
    pub fn of(command: PortCommand) -> Option<VifCommand> {
        let PortCommand::Queue(command) = command else { return None };
        command.downcast().ok().map(|command| *command)
    }
}

impl VifSettings {
    /// Returns the settings in a port's command. Returns `None` if it is another one.
    pub fn of(command: &PortCommand) -> Option<VifSettings> {
        let PortCommand::WholePort(command) = command else { return None };
        command.downcast_ref().copied()
    }
}

impl VifReply {
    /// Takes the vif's reply out of a port's reply. Returns `None` if the port did not execute the command.
    pub fn of(reply: PortReply) -> Option<VifReply> {
        let PortReply::Own(reply) = reply else { return None };
        reply.downcast().ok().map(|reply| *reply)
    }
}

impl From<VifCommand> for PortCommand {
    fn from(command: VifCommand) -> PortCommand {
        PortCommand::Queue(Box::new(command))
    }
}

impl From<VifSettings> for PortCommand {
    fn from(settings: VifSettings) -> PortCommand {
        PortCommand::WholePort(Arc::new(settings))
    }
}

impl From<VifReply> for PortReply {
    fn from(reply: VifReply) -> PortReply {
        PortReply::Own(Box::new(reply))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_and_reply_arrive_unchanged_through_a_port() {
        let command = VifCommand::of(VifCommand::Resize(7).into());
        assert!(matches!(command, Some(VifCommand::Resize(7))));
        let settings = VifSettings { multicast_control: true, ..VifSettings::default() };
        assert_eq!(VifSettings::of(&settings.into()), Some(settings));
        let reply = VifReply::of(VifReply::PolicySet.into());
        assert!(matches!(reply, Some(VifReply::PolicySet)));
    }

    #[test]
    fn command_of_another_kind_of_port_is_refused() {
        assert!(VifCommand::of(PortCommand::SetMtu(1500)).is_none());
        assert!(VifCommand::of(PortCommand::Queue(Box::new(7))).is_none());
        assert!(VifSettings::of(&PortCommand::WholePort(Arc::new(7))).is_none());
        assert!(VifReply::of(PortReply::Unsupported).is_none());
    }
}
