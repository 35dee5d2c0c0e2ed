//! Connection to the driver domain of a switch, which is started if there is none.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::options::SwitchChoice;
use super::report::Reporter;
use ringfence_driver::proof;
use ringfence_guest::names::parse_switch_name;
use ringfence_hostnet::runtime_dir::{Lock, RuntimeDir, RuntimeDirError};
use ringfence_hostnet::text::{because, last_line, printable};
use ringfence_sys::descriptors::Descriptors;

use ringfence_driver::switchboard::{AttachRequest, Attached, DriverConfig, FromDriver, ToDriver};
use ringfence_sandbox::Ending;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sandbox::spawn::{Cleanup, DomainKind, DomainProcess, Spawn, SpawnError};
use ringfence_sandbox::supervisor::ExitReport;

/// Time limit for an answer of the driver domain, or for its end.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the exit report of a driver domain. Its supervisor sends it once it has reaped the process.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// First part of the name of a switch that one guest has for itself. The process number of its launcher follows.
const PRIVATE_PREFIX: &str = "private-";

/// Parses the name of a switch that guests may share.
pub(crate) fn parse_shared_switch(text: &str) -> Result<String, String> {
    let name = parse_switch_name(text).map_err(|error| error.to_string())?;
    let number = name.strip_prefix(PRIVATE_PREFIX);
    if number.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit())) {
        return Err(format!(
            "`{name}` is the name of a switch that one guest has for itself; guests meet on a switch \
             that all of them name by --switch"
        ));
    }
    Ok(name)
}

/// Attachment of a guest to a driver domain.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Name of the driver domain: that of its switch, if the guest is on one.
    pub(crate) switch: String,
    /// Properties that the driver domain assigned.
    pub(crate) attached: Attached,
    /// Channel to the driver domain, which detaches the guest when it closes.
    pub(crate) driver_channel: Channel,
    /// Connection to the hub for the guest's frontend.
    pub(crate) frontend_hub: OwnedFd,
    /// Connection to the store for the guest's names.
    pub(crate) names: OwnedFd,
    /// Driver domain, if this launcher started it.
    pub(crate) driver: Option<DomainProcess>,
}

/// Errors that prevent an attachment.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RendezvousError {
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("the driver domain: {0}")]
    Channel(#[from] ChannelError),
    #[error("the driver domain of switch `{switch}` {ending} as it was started{}", because(why.as_deref()))]
    Failed { switch: String, ending: Ending, why: Option<String> },
    #[error("switch `{switch}`: {why}")]
    Refused { switch: String, why: String },
    #[error("the driver domain of switch `{switch}` neither answers nor ends")]
    Stuck { switch: String },
}

/// Attaches a guest to the switch of its choice. Without a shared switch, a driver domain is started that no other
/// guest joins. A driver domain that is started makes `rings` rings for disks in files.
pub(crate) fn attach(
    directory: &RuntimeDir,
    choice: &SwitchChoice,
    rings: u16,
    request: &AttachRequest,
    reporter: Reporter,
) -> Result<Attachment, RendezvousError> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    loop {
        let Connected { switch, driver_channel, driver } =
            connect_or_start(directory, choice, rings, reporter)?;
        match ask(&driver_channel, request) {
            Ok((FromDriver::Attached(attached), fds)) => {
                let [frontend_hub, names] = expect_fds(fds)?;
                let attached = *attached;
                return Ok(Attachment {
                    switch,
                    attached,
                    driver_channel,
                    frontend_hub,
                    names,
                    driver,
                });
            }
            Ok((FromDriver::Refused(why), _)) => {
                let why = printable(&why);
                return Err(RendezvousError::Refused { switch, why });
            }
            // The driver domain ended first, or a supervisor answered with an exit report.
            Ok(_) | Err(ChannelError::Closed | ChannelError::Malformed(_)) => {}
            Err(ChannelError::TimedOut(_)) => return Err(RendezvousError::Stuck { switch }),
            Err(error) => return Err(error.into()),
        }
        if let Some(driver) = driver {
            return Err(failed(&switch, &driver));
        }
        if Instant::now() >= deadline {
            return Err(RendezvousError::Stuck { switch });
        }
        reporter.step("the driver domain was on its way out; trying again");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ask(
    driver_channel: &Channel,
    request: &AttachRequest,
) -> Result<(FromDriver, Descriptors), ChannelError> {
    proof::introduce(driver_channel)?;
    driver_channel.send(&ToDriver::Attach(Box::new(request.clone())), &[])?;
    driver_channel.receive_within(ANSWER_TIMEOUT)
}

/// Requests the exit report of a driver domain that has just ended. Returns `None` if its
/// supervisor is gone, too.
pub(crate) fn ask_exit_report(directory: &RuntimeDir, switch: &str) -> Option<ExitReport> {
    let socket = directory.connect(switch).ok()??;
    let (exit_report, _) = Channel::from_fd(socket).receive_within(EXIT_REPORT_TIMEOUT).ok()?;
    Some(exit_report)
}

fn failed(switch: &str, driver: &DomainProcess) -> RendezvousError {
    let ended = driver.wait_ended(Duration::from_secs(2));
    let (ending, words) = match ended {
        Some(ended) => (ended.ending, ended.stderr_tail),
        None => (Ending::Unknown, String::new()),
    };
    RendezvousError::Failed { switch: switch.to_owned(), ending, why: last_line(&words) }
}

/// Connection to a driver domain.
struct Connected {
    switch: String,
    driver_channel: Channel,
    /// The driver domain, if it was started for this connection.
    driver: Option<DomainProcess>,
}

/// Connects to the switch's driver domain, and starts it if there is none. The lock admits one
/// launcher at a time.
fn connect_or_start(
    directory: &RuntimeDir,
    choice: &SwitchChoice,
    rings: u16,
    reporter: Reporter,
) -> Result<Connected, RendezvousError> {
    let lock = directory.lock()?;
    let switch = match choice {
        SwitchChoice::Shared(name) => name.clone(),
        SwitchChoice::Private | SwitchChoice::None => unused_name(directory)?,
    };
    if let Some(hub) = directory.connect(&switch)? {
        reporter.step(format_args!("switch `{switch}` is there"));
        return Ok(Connected { switch, driver_channel: Channel::from_fd(hub), driver: None });
    }
    let config = DriverConfig { switch, verbose: reporter.is_verbose(), rings };
    let driver = start(directory, &config, &lock, reporter)?;
    let switch = config.switch;
    // The connection is queued until the driver domain accepts it.
    let hub = directory.connect(&switch)?.ok_or_else(|| failed(&switch, &driver))?;
    Ok(Connected { switch, driver_channel: Channel::from_fd(hub), driver: Some(driver) })
}

/// Returns the name of a driver domain that does not exist. Launchers in several PID namespaces may have the same
/// process number. The directory must be locked.
fn unused_name(directory: &RuntimeDir) -> Result<String, RuntimeDirError> {
    let own = format!("{PRIVATE_PREFIX}{}", std::process::id());
    let mut name = own.clone();
    let mut number = 1;
    while directory.connect(&name)?.is_some() {
        number += 1;
        name = format!("{own}-{number}");
    }
    Ok(name)
}

/// Starts the driver domain of a switch.
fn start(
    directory: &RuntimeDir,
    config: &DriverConfig,
    lock: &Lock,
    reporter: Reporter,
) -> Result<DomainProcess, RendezvousError> {
    let switch = &config.switch;
    let (listener, socket) = directory.listen(switch, lock)?;
    let cleanup = Cleanup {
        directory: directory.as_fd(),
        socket: socket.clone(),
        listener: listener.as_fd(),
    };
    let spawn = Spawn {
        kind: DomainKind::Driver,
        command: &[],
        inherit: &[],
        cleanup: Some(cleanup),
        cgroup: None,
    };
    let started = DomainProcess::start(&spawn).map_err(RendezvousError::from).and_then(|driver| {
        let namespace = proof::own_user_namespace().map_err(ChannelError::from)?;
        driver.channel().send(config, &[listener.as_fd(), namespace.as_fd()])?;
        Ok(driver)
    });
    let driver = started.inspect_err(|_| directory.withdraw(&socket, lock))?;
    reporter.step(format_args!(
        "switch `{switch}` is new: started its driver domain, kept by process {}",
        driver.supervisor_pid()
    ));
    Ok(driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_name_in_use_gets_a_number() {
        let outer = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::open_at(outer.path().join("r")).unwrap();
        let first = unused_name(&directory).unwrap();
        assert_eq!(first, format!("{PRIVATE_PREFIX}{}", std::process::id()));
        let _listener = directory.listen(&first, &directory.lock().unwrap()).unwrap();
        assert_eq!(unused_name(&directory).unwrap(), format!("{first}-2"));
    }
}
