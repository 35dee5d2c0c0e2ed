//! Questions of the egress policy in a session (`--ask`, [`ringfence_uplink_process::asking`]): passes questions of the uplink on,
//! and answers back.
//!
//! A session has no terminal of its own: in the background it has none, and in the foreground the command has it. So
//! `--ask terminal` denies at once.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use ringfence_sandbox::channel::Channel;
use ringfence_uplink_process::FromUplink;
use ringfence_uplink_process::asking::Asker;
use ringfence_uplink_process::egress::guest::GuestEgress;
use ringfence_uplink_process::orders::UplinkOrder;

use super::args::PastaArgs;
use super::messages::Messages;
use super::target::Target;

/// Open questions of a session, if it asks any.
#[derive(Debug)]
pub(crate) struct Questions(Option<Asker>);

/// Opens the files of egress records, lists denials, and prepares questions, with the rights of the user that starts the session.
///
/// # Errors
///
/// Returns the first wrong rule, or the reason for which a file cannot be opened.
pub(crate) fn open(args: &PastaArgs, target: &Target) -> anyhow::Result<(GuestEgress, Questions)> {
    let policy = args.ask.apply(args.egress.source()?, &args.egress)?;
    let egress = GuestEgress::open(policy, &args.egress, target.record_name())?;
    let egress = egress.with_denials().with_questions(args.ask.limits());
    let asker = Asker::new(&args.ask, &args.egress.policy, target.record_name())?;
    Ok((egress, Questions(asker)))
}

impl Questions {
    /// Takes the message if it is about a question. Returns other messages.
    pub(crate) fn take(&mut self, message: Option<FromUplink>) -> Option<FromUplink> {
        match (message, &mut self.0) {
            (Some(FromUplink::Question(about)), Some(asker)) => asker.ask(about),
            (Some(FromUplink::QuestionOver(number)), Some(asker)) => asker.end(number),
            (message, _) => return message,
        }
        None
    }

    /// Reads answers, and passes them to the uplink.
    pub(crate) fn serve(&mut self, uplink: &Channel, messages: &mut Messages) {
        let Some(asker) = &mut self.0 else { return };
        asker.advance(None);
        for (id, answer) in asker.take_answers() {
            // An uplink that has failed reports that itself. Its questions end with their time.
            let _ = uplink.send_now(&UplinkOrder::Answer { id, answer }, &[]);
        }
        asker.take_messages().into_iter().for_each(|text| messages.summary(text));
    }

    /// Iterates over the descriptors to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flat_map(Asker::fds)
    }

    /// Returns the time at which [`Questions::serve`] must be called next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.as_ref().and_then(Asker::deadline)
    }
}
