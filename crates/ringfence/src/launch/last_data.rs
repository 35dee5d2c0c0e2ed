//! Last data of a guest whose programs have ended: packets in the interfaces of its network namespace, and data of its TCP
//! connections that the other ends have yet to take.
//!
//! The namespace exists as long as the frontend and the uplink have files of its TAPs, and its kernel goes on to send. Both carry
//! what is left before they end: without that, the last datagram of a command and the rest of its last upload would be lost.
//! A signal of the user ends the wait.

use std::time::{Duration, Instant};

use ringfence_driver::switchboard::{FromFrontend, ToFrontend};
use ringfence_guest::ToGuest;
use ringfence_sys::poll::wait_any;
use ringfence_uplink::runner::DRAIN_MAX;
use ringfence_uplink_process::FromUplink;
use ringfence_uplink_process::orders::UplinkOrder;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::events::ProcessEvent;
use super::guest_processes::{GuestProcesses, Outcome};

/// Maximum time that the processes may need for their answers, beyond that of a drain.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

impl GuestProcesses<'_> {
    /// Waits until the frontend and the uplink have carried the guest's last data.
    pub(super) fn carry_last_data(&mut self) {
        if let Some(terminal) = &mut self.terminal {
            terminal.release_keys(self.signals);
        }
        let is_sent = |sent: Result<(), _>| sent.is_ok();
        let frontend = self.frontend.channel().map(|to| to.send_now(&ToFrontend::Drain, &[]));
        let uplink = self.uplink.channel().map(|to| to.send_now(&UplinkOrder::Drain, &[]));
        let mut frontend = frontend.is_some_and(is_sent);
        let mut uplink = uplink.is_some_and(is_sent);
        let until = Instant::now() + DRAIN_MAX + ANSWER_WITHIN;
        while (frontend || uplink) && Instant::now() < until && !self.is_interrupted() {
            // Other messages of a guest that has ended concern nobody, and records are written as they come.
            let event = match self.look_at_frontend() {
                Some(event) => Some(event),
                None => self.look_at_uplink(),
            };
            match event {
                Some(
                    ProcessEvent::Frontend(FromFrontend::Drained | FromFrontend::Failed(_))
                    | ProcessEvent::FrontendGone(_),
                ) => frontend = false,
                Some(
                    ProcessEvent::Uplink(FromUplink::Drained | FromUplink::Failed(_))
                    | ProcessEvent::UplinkGone(_),
                ) => uplink = false,
                Some(_) => {}
                None if self.wait_for_processes(until).is_err() => return,
                None => {}
            }
        }
    }

    /// Passes a signal on to the command. One that init does not get any more is for this program.
    pub(super) fn pass_or_note(&mut self, number: i32) -> Result<(), Outcome> {
        let is_passed = self.try_send_to_guest(&ToGuest::Signal(number), &[])?;
        self.has_late_signal |= !is_passed && asks_to_end(number);
        Ok(())
    }

    /// Returns `true` if a signal asks this program to end.
    fn is_interrupted(&mut self) -> bool {
        let mut is_interrupted = self.has_late_signal;
        while let Ok(Some(arrived)) = self.signals.next() {
            is_interrupted |= asks_to_end(arrived.number);
        }
        is_interrupted
    }

    /// Waits for a signal, or an event of the frontend or the uplink.
    fn wait_for_processes(&self, until: Instant) -> std::io::Result<()> {
        let channels = self.frontend.fds().chain(self.uplink.fds());
        let mut fds = vec![PollFd::new(self.signals, PollFlags::IN)];
        fds.extend(channels.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        wait_any(&mut fds, Some(until)).map(drop)
    }
}

fn asks_to_end(signal: i32) -> bool {
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].map(Signal::as_raw).contains(&signal)
}
