//! Checks that the command understands the command lines of the systemd units.

use std::path::Path;

use clap::Parser;
use ringfence::cli::{Cli, Command};
use ringfence::vhost_user::DeviceArgs;
use ringfence_driver::xen::config::{Config, PATH_DEFAULT};

const UNIT: &str = include_str!("../../../../dist/ringfence-serve.service");

/// Returns the values of a setting, in order.
fn values(key: &str) -> impl Iterator<Item = &str> {
    let setting = move |line: &'static str| line.strip_prefix(key)?.strip_prefix('=');
    UNIT.lines().filter_map(setting)
}

#[test]
fn command_lines_of_unit_are_valid() {
    let keys = ["ExecStartPre", "ExecStart", "ExecReload"];
    let lines: Vec<_> = keys.into_iter().flat_map(values).collect();
    let own: Vec<_> = lines.iter().filter(|line| line.starts_with("/usr/bin/ringfence ")).collect();
    assert_eq!(own.len(), 3, "{lines:?}");
    for line in own {
        match Cli::try_parse_from(line.split(' ')).map(|cli| cli.command) {
            Ok(Command::Serve(args)) => assert_eq!(args.config, Path::new(PATH_DEFAULT)),
            other => panic!("{line}: {other:?}"),
        }
    }
    // The unit checks the configuration before it sends the signal.
    assert_eq!(
        values("ExecReload").collect::<Vec<_>>(),
        ["/usr/bin/ringfence serve --check", "/bin/kill -HUP $MAINPID"]
    );
}

/// Units for the devices of virtual machines.
const OF_NET: &str = include_str!("../../../../dist/ringfence-vhost-user-net@.service");
const OF_BLK: &str = include_str!("../../../../dist/ringfence-vhost-user-blk@.service");
const OF_SHIELD: &str = include_str!("../../../../dist/ringfence-shield@.service");

#[test]
fn command_lines_of_units_for_virtual_machines_are_valid() {
    for (unit, kind) in [(OF_NET, "net"), (OF_BLK, "blk"), (OF_SHIELD, "shield")] {
        let line = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        // The example in the head of the unit.
        let options = line("#   echo 'OPTIONS=").split_once('\'').unwrap().0;
        let start = line("ExecStart=").replace("%t", "/run").replace("%i", "vm1");
        let start = start.replace("$OPTIONS", options);
        let (socket, status) = match Cli::try_parse_from(start.split(' ')).map(|cli| cli.command) {
            Ok(Command::VhostUser(args)) => match args.device {
                DeviceArgs::Net(args) => (args.socket, args.status_socket),
                DeviceArgs::Blk(args) => (args.socket, args.status_socket),
            },
            Ok(Command::Shield(args)) => (args.listen, args.status_socket),
            other => panic!("{start}: {other:?}"),
        };
        let expected = format!("/run/ringfence-vhost-user/vm1.{kind}");
        assert_eq!(socket, Path::new(&expected));
        assert_eq!(status.as_deref(), Some(Path::new(&format!("{expected}-status"))));
        assert_eq!(line("RuntimeDirectory="), "ringfence-vhost-user");
        assert_eq!(line("EnvironmentFile="), format!("/etc/ringfence/%i.{kind}"));
        assert_eq!(line("Restart="), "always");
    }
}

#[test]
fn unit_preserves_runtime_directory() {
    let socket = Config::default().serve.status_socket;
    let [directory] = values("RuntimeDirectory").collect::<Vec<_>>()[..] else { panic!("{UNIT}") };
    assert_eq!(socket.parent(), Some(Path::new("/run").join(directory).as_path()));
    assert_eq!(values("RuntimeDirectoryPreserve").collect::<Vec<_>>(), ["yes"]);
}
