//! Namespaces for tests with a real kernel. A test starts itself again in a child process by `unshare -rn`
//! (util-linux), with `ip` (iproute2) to set up interfaces.
//!
//! On a machine that lacks a requirement the test prints `SKIPPED: reason` and checks nothing. It fails instead
//! if `RINGFENCE_TEST_REQUIRE` is 1.

use std::process::{Command, Stdio};

const ROLE: &str = "RINGFENCE_TEST_ROLE";

/// Runs `test`, the body of the test `name`, in namespaces of its own.
pub(crate) fn in_namespaces(name: &str, test: impl FnOnce()) {
    if std::env::var_os(ROLE).is_some() {
        return test();
    }
    if let Some(reason) = missing() {
        let required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
        assert!(!required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
        println!("SKIPPED: {reason}");
        return;
    }
    let mut command = Command::new("unshare");
    command.arg("-rn").arg(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    let output = command.env(ROLE, "test").stderr(Stdio::inherit()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // The child's result line is removed, so that the test is counted once.
    said.lines()
        .filter(|line| !line.starts_with("test result: "))
        .for_each(|line| println!("{line}"));
    let passed = said.contains("1 passed");
    assert!(output.status.success() && passed, "in its namespaces the test failed");
}

fn missing() -> Option<String> {
    let tun = std::fs::File::options().read(true).write(true).open("/dev/net/tun");
    if let Err(error) = tun {
        return Some(format!("/dev/net/tun: {error}"));
    }
    match Command::new("unshare").args(["-rn", "true"]).output() {
        Err(_) => return Some("`unshare` is not installed (Debian: util-linux)".to_owned()),
        Ok(output) if !output.status.success() => {
            let why = String::from_utf8_lossy(&output.stderr);
            return Some(format!("user namespaces may not be made: {}", why.trim()));
        }
        Ok(_) => {}
    }
    let ip = Command::new("ip").arg("-V").output();
    let has_ip = ip.is_ok_and(|output| output.status.success());
    (!has_ip).then(|| "`ip` is not installed (Debian: iproute2)".to_owned())
}

/// Runs `ip ARGS` in this process's network namespace.
pub(crate) fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}
