//! Checks that the command understands the command lines of the systemd unit.

use std::path::Path;

use clap::Parser;
use ringfence::cli::{Cli, Command};
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

#[test]
fn unit_preserves_runtime_directory() {
    let socket = Config::default().serve.status_socket;
    let [directory] = values("RuntimeDirectory").collect::<Vec<_>>()[..] else { panic!("{UNIT}") };
    assert_eq!(socket.parent(), Some(Path::new("/run").join(directory).as_path()));
    assert_eq!(values("RuntimeDirectoryPreserve").collect::<Vec<_>>(), ["yes"]);
}
