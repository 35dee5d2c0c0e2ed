//! Questions of the egress policy in the launcher ([`ringfence_uplink_process::asking`]): passes questions of the uplink on, and
//! answers back.

use ringfence_uplink_process::asking::Prompt;
use ringfence_uplink_process::messages::AskedAbout;
use ringfence_uplink_process::orders::UplinkOrder;

use super::guest_processes::GuestProcesses;
use super::terminal::CommandTerminal;

impl GuestProcesses<'_> {
    /// Asks a question of the uplink.
    pub(super) fn ask(&mut self, about: AskedAbout) {
        if let Some(asker) =
            self.uplink.with_channel().and_then(|(uplink, _)| uplink.asker.as_mut())
        {
            asker.ask(about);
        }
        self.serve_questions();
    }

    /// Ends a question of the uplink.
    pub(super) fn end_question(&mut self, number: u64) {
        if let Some(asker) =
            self.uplink.with_channel().and_then(|(uplink, _)| uplink.asker.as_mut())
        {
            asker.end(number);
        }
        self.serve_questions();
    }

    /// Reads answers, and passes them to the uplink.
    pub(super) fn serve_questions(&mut self) {
        let Some((uplink, channel)) = self.uplink.with_channel() else { return };
        let Some(asker) = &mut uplink.asker else { return };
        asker.advance(self.terminal.as_mut().map(|terminal| terminal as &mut dyn Prompt));
        for (id, answer) in asker.take_answers() {
            // An uplink that has failed reports that itself. Its questions end with their time.
            let _ = channel.send_now(&UplinkOrder::Answer { id, answer }, &[]);
        }
        let messages = asker.take_messages();
        if !messages.is_empty() {
            let name = self.host_name();
            for message in messages {
                self.reporter.summary(format_args!("guest {name}: {message}"));
            }
        }
    }
}

impl Prompt for CommandTerminal {
    fn is_available(&self) -> bool {
        self.relay().is_some_and(|relay| relay.can_ask())
    }

    fn show(&mut self, text: &str) {
        if let Some(relay) = self.relay_mut() {
            relay.begin_dialog(text);
        }
    }

    fn take_line(&mut self) -> Option<String> {
        self.relay_mut()?.take_dialog_line()
    }

    fn close(&mut self) {
        if let Some(relay) = self.relay_mut() {
            relay.end_dialog();
        }
    }
}
