//! Process of the daemon: sandbox, lock, signals.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use ringfence_hostnet::log;
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_platform::{Platform, PlatformChoice};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::isolation::Confinement;
use ringfence_sandbox::limits::raise_descriptor_limit;
use ringfence_sandbox::signals::Signals;
use ringfence_sys::pressure::PressureMonitor;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::process::Signal;
use rustix::thread::CapabilitySet;

use super::args::ServeArgs;
use super::config::Config;
use super::domain::{self, ServeError};
use super::setup::{Setup, sockets};

/// Serves until a signal ends the daemon. Returns the exit status.
pub fn main(args: &ServeArgs) -> u8 {
    // The sandbox changes the working directory.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let setup = Setup {
        config: absolute(&args.config),
        on_exit: args.on_exit,
        platform: args.platform.clone(),
        runtime_dir: absolute(&args.runtime_dir),
    };
    let done = match setup.load() {
        Ok(_) if args.check => {
            println!("{}", verdict(&args.config, args.config.exists()));
            Ok(())
        }
        Ok(config) => serve(setup, config),
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: serve: {error}");
            STATUS_FAILED
        }
    }
}

/// Returns the result of `--check` for a configuration without errors. Only the default file may be missing.
fn verdict(path: &Path, exists: bool) -> String {
    match exists {
        true => format!("{}: right", path.display()),
        false => format!("{}: there is no such file, so the defaults apply", path.display()),
    }
}

fn serve(setup: Setup, config: Config) -> Result<(), ServeError> {
    log::to_stderr_at(config.serve.log_level.level());
    let signals = Signals::new(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    // No directory may stay open: its parent directories lead out of the view.
    drop(RuntimeDir::open_at(setup.runtime_dir.clone())?);
    let _lock = lock(setup.runtime_dir.join("serve.lock"))?;
    raise_descriptor_limit()?;
    match setup.platform.clone() {
        PlatformChoice::Xen => {
            let platform = XenPlatform::open(Side::Backend)?;
            run(setup, config, platform, signals)
        }
        PlatformChoice::Local(socket) => {
            let platform = LocalPlatform::join(&socket)?;
            run(setup, config, platform, signals)
        }
    }
}

/// Enters the sandbox and serves.
fn run<P: Platform>(
    setup: Setup,
    config: Config,
    platform: P,
    signals: Signals,
) -> Result<(), ServeError> {
    // Its files are not in the view.
    let pressure = PressureMonitor::open();
    if let Some(why) = pressure.errors() {
        tracing::debug!("{why}");
    }
    let (files, sockets) = (setup.view(&config), sockets(&config));
    let confinement = Confinement::enter(CapabilitySet::NET_ADMIN, &files, sockets)?;
    let daemon = domain::start(setup, config, platform, signals, pressure)?;
    confinement.lock()?;
    daemon.serve()
}

/// Locks the file and writes the process id into it. The lock holds until the file is closed.
fn lock(path: PathBuf) -> Result<File, ServeError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fail = |what| {
        let path = path.clone();
        move |source: io::Error| ServeError::File { path, what, source }
    };
    let open = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
    let mut file = File::from(open.map_err(io::Error::from).map_err(fail("cannot be opened"))?);
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut text = String::new();
        // The process id is only a hint in the message.
        let _ = (&file).take(16).read_to_string(&mut text);
        return Err(ServeError::AnotherRuns { pid: text.trim_end().parse().ok() });
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).map_err(fail("cannot be written"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::super::config::PATH_DEFAULT;
    use super::*;

    #[test]
    fn check_without_a_file_says_that_the_defaults_apply() {
        let path = Path::new(PATH_DEFAULT);
        assert_eq!(verdict(path, true), format!("{PATH_DEFAULT}: right"));
        assert!(verdict(path, false).contains("no such file, so the defaults apply"));
    }
}
