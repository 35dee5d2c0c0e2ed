//! Outcomes of a guest's end: of its command, or of a process that it needs.

use std::time::Duration;

use ringfence_sandbox::spawn::{Ended, Process};
use ringfence_sandbox::{Ending, STATUS_FAILED};
use ringfence_sys::poll::wait_hung_up;
use rustix::process::Signal;

use super::guest_processes::{GRACE, GuestProcesses, Outcome};
use super::rendezvous;
use ringfence_hostnet::text::{because, last_line};

/// Maximum wait for the end of a driver domain whose store or rings are gone already. Its supervisor can end first.
const DRIVER_END_MAX: Duration = Duration::from_millis(500);

impl GuestProcesses<'_> {
    pub(super) fn command_ended(&self, ending: Ending) -> Outcome {
        // After init all processes that the command started are gone.
        let ended = self.guest.running().and_then(|guest| guest.domain.wait_ended(GRACE));
        let why = self.lack_of_memory(ending, ended.as_ref());
        let loud = match ending {
            Ending::Killed(number) => {
                ![Signal::INT.as_raw(), Signal::PIPE.as_raw()].contains(&number)
            }
            Ending::Exited(_) | Ending::Unknown => false,
        };
        if loud {
            self.reporter.summary(format_args!("the command {ending}{why}"));
        }
        Outcome { status: ending.exit_status(), problem: None, ending: Some(ending) }
    }

    /// Returns the reason for a kill, if the guest has reached its limit of memory. `ended` is the report of the guest's
    /// supervisor, which removes the cgroup with its count.
    fn lack_of_memory(&self, ending: Ending, ended: Option<&Ended>) -> &'static str {
        let is_killed = ending == Ending::Killed(Signal::KILL.as_raw());
        match ended.and_then(|ended| ended.killed_for_memory) {
            Some(1..) if is_killed && self.options.limits.memory.is_some() => {
                ": the guest has reached its limit of memory (--memory)"
            }
            _ => "",
        }
    }

    pub(super) fn gone(&self, who: &str, ended: &Ended) -> Outcome {
        let why = because(last_line(&ended.stderr_tail).as_deref());
        let process = match ended.first {
            Process::Inner => "",
            Process::Supervisor => "the supervisor of ",
        };
        Outcome::failed(format!("{process}{who} {}{why}; this guest ends with it", ended.ending))
    }

    /// Returns the outcome for an init that failed. One that cannot go on may have lost the store, which the driver domain's
    /// supervisor serves until the guest's frontend ends.
    pub(super) fn init_failed(&self, status: u8, why: String) -> Outcome {
        let outcome = Outcome { status, problem: Some(why), ending: None };
        if status != STATUS_FAILED {
            return outcome;
        }
        let frontend = self.frontend.running().map(|frontend| &frontend.domain);
        let ended = frontend.and_then(|domain| domain.wait_ended(DRIVER_END_MAX));
        let outcome = ended.map_or(outcome, |ended| self.gone("the frontend", &ended));
        self.unless_driver_gone(outcome)
    }

    /// Reports the end of the driver domain as the reason if the frontend or the guest's init ended because of it.
    pub(super) fn unless_driver_gone(&self, outcome: Outcome) -> Outcome {
        let gone = self
            .driver_channel()
            .is_some_and(|channel| matches!(wait_hung_up(channel, DRIVER_END_MAX), Ok(true)));
        if gone { self.driver_gone() } else { outcome }
    }

    pub(super) fn driver_gone(&self) -> Outcome {
        let switch = self.driver_name();
        let report = rendezvous::ask_exit_report(self.presence.directory(), switch);
        let (ending, words) = match report {
            Some(report) => (report.ending, report.stderr_tail),
            None => {
                // Its supervisor was killed too, and could not clean up.
                if let Err(error) = self.presence.directory().remove_if_stale(switch) {
                    self.reporter.step(error);
                }
                (Ending::Unknown, String::new())
            }
        };
        let why = because(last_line(&words).as_deref());
        let of =
            self.switch().map_or("of its disks".to_owned(), |name| format!("of switch `{name}`"));
        Outcome::failed(format!("the driver domain {of} {ending}{why}; this guest ends with it"))
    }
}
