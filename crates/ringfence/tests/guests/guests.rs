//! `ringfence ps`, `exec`, `logs`, `status` and `stop`: guests are found by name, run further commands and end on request. Neither another
//! user nor the command of a guest reaches the socket behind them.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use crate::require;
use crate::support::needs::Need;
use crate::support::users::Site;
use crate::support::{Finished, Lab, MOMENT, Running, WITH_FULL_PIPE, eventually};

/// User id of nobody else's.
const OTHER_USER: &str = "65533";

fn command(lab: &Lab, words: &[&str]) -> Finished {
    let words: Vec<&str> = [lab.program()].into_iter().chain(words.iter().copied()).collect();
    lab.spawn(&words).finish(MOMENT)
}

/// Starts a guest that sleeps, and waits until `ps` shows it.
fn sleeper(lab: &Lab, name: &str) -> Running {
    let guest = lab.run(&format!("--name {name} --switch none"), &["sleep", "1000"]);
    let listed = || command(lab, &["ps"]).stdout.contains(name);
    assert!(eventually(MOMENT, listed), "{}", command(lab, &["ps"]).stdout);
    guest
}

fn listed(lab: &Lab) -> serde_json::Value {
    let finished = command(lab, &["ps", "--json"]);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    serde_json::from_str(&finished.stdout).unwrap()
}

#[test]
fn ps_lists_guests_while_their_commands_run() {
    require!(Need::Guests);
    let lab = Lab::new();
    assert_eq!(listed(&lab), serde_json::json!([]));
    let web = lab.run("-q --name web --switch blue --address 10.9.8.7/24", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    let other = sleeper(&lab, "other");
    let guests = listed(&lab);
    assert_eq!(guests[0]["switch"], "blue");
    assert_eq!(guests[0]["addresses"], serde_json::json!(["10.9.8.7/24"]));
    assert_eq!(guests[0]["command"], serde_json::json!(["sleep", "1000"]));
    assert!(guests[0]["memory"].as_u64().unwrap() > 0);
    assert_eq!(guests[1]["name"], "other");
    assert_eq!(guests[1]["switch"], serde_json::Value::Null);
    assert_eq!(guests[1]["pid"].as_i64(), Some(other.pid().as_raw_nonzero().get().into()));
    let table = command(&lab, &["ps"]).stdout;
    assert!(table.starts_with("NAME") && table.lines().count() == 3, "{table}");
    // Neither an end on request nor one by a kill leaves a guest in the list.
    web.end();
    rustix::process::kill_process(other.pid(), Signal::KILL).unwrap();
    other.finish(MOMENT);
    assert!(eventually(MOMENT, || listed(&lab) == serde_json::json!([])));
    assert!(guest_sockets(&lab).is_empty(), "the socket of a killed launcher is removed");
    lab.assert_no_switch();
}

#[test]
fn exec_runs_a_command_with_network_and_streams_of_the_guest() {
    require!(Need::Guests, Need::Program("ip", "iproute2"));
    let lab = Lab::new();
    let guest = lab.script(
        "-q --name web --switch blue --address 10.9.8.7/24",
        "hostname > host; touch up; sleep 1000",
    );
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web" && lab.file("up").exists()));
    let shown = command(&lab, &["exec", "web", "--", "ip", "-br", "address", "show", "eth0"]);
    assert_eq!(shown.status, Some(0), "{}", shown.stderr);
    assert!(shown.stdout.contains("10.9.8.7/24"), "{}", shown.stdout);
    let script = "hostname; cat; echo error >&2; exit 7";
    let words =
        format!("echo input | {} exec web -- sh -c '{script}'; echo status $?", lab.program());
    let finished = lab.spawn(&["sh", "-c", &words]).finish(MOMENT);
    let host = lab.read("host");
    assert_eq!(finished.stdout, format!("{host}input\nstatus 7\n"), "{}", finished.stderr);
    assert_eq!(finished.stderr, "error\n");
    drop(guest.end());
    lab.assert_no_switch();
}

#[test]
fn exec_returns_the_status_of_a_shell_for_what_cannot_run() {
    require!(Need::Guests);
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    for (words, status, why) in [
        (&["exec", "web", "--", "no-such-command"][..], 127, "no-such-command: command not found"),
        (&["exec", "web", "--", "sh", "-c", "kill -9 $$"], 137, ""),
        (&["exec", "nobody", "--", "true"], 125, "no guest of yours is called `nobody`"),
        (&["exec", "--no-such-option", "web"], 125, "unexpected argument"),
        (&["run", "--no-such-option"], 125, "unexpected argument"),
        (&["ps", "--no-such-option"], 2, "unexpected argument"),
    ] {
        let finished = command(&lab, words);
        assert_eq!(finished.status, Some(status), "{words:?}: {}", finished.stderr);
        assert!(finished.stderr.contains(why), "{words:?}: {}", finished.stderr);
    }
    guest.end();
}

#[test]
fn signals_reach_the_command_of_exec_and_its_client_ends_with_the_guest() {
    require!(Need::Guests);
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    let script = "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let client = lab.spawn(&[lab.program(), "exec", "web", "--", "sh", "-c", script]);
    client.wait_for_output("ready");
    let finished = client.end();
    assert_eq!((finished.status, finished.stdout.as_str()), (Some(9), "ready\ncaught\n"));
    // A client that is killed takes its command with it.
    let script = "trap 'touch hung-up; exit' HUP; echo ready; while :; do sleep 0.05; done";
    let client = lab.spawn(&[lab.program(), "exec", "web", "--", "sh", "-c", script]);
    client.wait_for_output("ready");
    rustix::process::kill_process(client.pid(), Signal::KILL).unwrap();
    assert!(eventually(MOMENT, || lab.file("hung-up").exists()));
    client.finish(MOMENT);
    let script = "echo ready; exec sleep 1000";
    let client = lab.spawn(&[lab.program(), "exec", "web", "--", "sh", "-c", script]);
    client.wait_for_output("ready");
    guest.end();
    let finished = client.finish(MOMENT);
    assert_eq!(finished.status, Some(137), "{}", finished.stderr);
}

#[test]
fn stop_ends_a_guest_and_kills_a_command_that_ignores_it() {
    require!(Need::Guests);
    let lab = Lab::new();
    let polite = sleeper(&lab, "polite");
    let stubborn = lab.script(
        "-q --name stubborn --switch none",
        "trap '' TERM; touch up; while :; do sleep 0.1; done",
    );
    assert!(eventually(MOMENT, || lab.file("up").exists()));
    assert_eq!(command(&lab, &["stop", "polite"]).status, Some(0));
    assert_eq!(polite.finish(MOMENT).status, Some(143));
    assert_eq!(command(&lab, &["stop", "--time", "1", "stubborn"]).status, Some(0));
    assert_eq!(stubborn.finish(MOMENT).status, Some(137));
    let finished = command(&lab, &["stop", "polite"]);
    assert_eq!(finished.status, Some(125));
    assert!(finished.stderr.contains("ringfence ps"), "{}", finished.stderr);
}

#[test]
fn logs_have_steps_of_a_quiet_guest_and_the_reason_of_its_end() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    let guest = lab.run("-q --name web --switch blue", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    // The last step of a start.
    let logged = || command(&lab, &["logs", "web"]).stdout;
    assert!(eventually(MOMENT, || logged().contains("launcher: the command runs")), "{}", logged());
    let logs = command(&lab, &["logs", "web"]);
    assert_eq!((logs.status, logs.stderr.as_str()), (Some(0), ""));
    for text in ["launcher: switch `blue` is new", "launcher: web is on switch `blue`"] {
        assert!(logs.stdout.contains(text), "{}", logs.stdout);
    }
    let last = command(&lab, &["logs", "--json", "-n", "1", "web"]).stdout;
    let last: serde_json::Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["source"], "launcher");
    assert_eq!(last["number"].as_u64(), Some(logs.stdout.lines().count() as u64), "{last}");
    // A connection that is no launcher's, which the driver domain reports.
    let attack = "
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(b'\"Stats\"')
s.recv(1 << 16)";
    let socket = lab.runtime_dir().join("blue.sock");
    let follower = lab.spawn(&[lab.program(), "logs", "--follow", "-n", "0", "web"]);
    // Only a report after the follower has connected is shown.
    let is_reported = || {
        lab.spawn(&["python3", "-c", attack, socket.to_str().unwrap()]).succeed(MOMENT);
        eventually(Duration::from_secs(1), || follower.stdout.text().contains("driver domain: "))
    };
    assert!(eventually(MOMENT, is_reported), "{}", follower.stdout.text());
    rustix::process::kill_process(guest.inner("frontend").pid, Signal::KILL).unwrap();
    assert_eq!(guest.finish(MOMENT).status, Some(125));
    let followed = follower.finish(MOMENT);
    assert_eq!(followed.status, Some(0), "{}", followed.stderr);
    let reason = "launcher: the frontend was killed by signal 9 (SIGKILL); this guest ends with it";
    assert!(followed.stdout.trim_end().ends_with(reason), "{}", followed.stdout);
    let gone = command(&lab, &["logs", "web"]);
    assert_eq!(gone.status, Some(125));
    assert!(gone.stderr.contains("no guest of yours is called `web`"), "{}", gone.stderr);
    lab.assert_no_switch();
}

#[test]
fn status_of_a_guest_has_its_counters_and_no_neighbour_s() {
    require!(Need::Guests);
    let lab = Lab::new();
    let server = lab.run("-q --name web --switch blue --address 10.9.8.7/24", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    let script = "(echo x > /dev/udp/10.9.8.7/9) 2>/dev/null || true; touch sent; sleep 1000";
    let client = lab.run("-q --name client --switch blue --mode staging", &["bash", "-c", script]);
    assert!(eventually(MOMENT, || lab.file("sent").exists()));
    let status = |name: &str| -> serde_json::Value {
        let finished = command(&lab, &["status", name, "--json"]);
        assert_eq!(finished.status, Some(0), "{}", finished.stderr);
        serde_json::from_str(&finished.stdout).unwrap()
    };
    // The client's question for the address of `web` is counted before the answer.
    let counted = || {
        let ports = status("web")["counters"]["ports"].to_string();
        ports.contains("tx_bytes") && ports.contains("rx_frames")
    };
    assert!(eventually(MOMENT, counted), "{}", status("web"));
    let (web, other) = (status("web"), status("client"));
    assert_eq!((&web["name"], &web["switch"]), (&"web".into(), &"blue".into()));
    let ports = |status: &serde_json::Value| -> Vec<String> {
        status["counters"]["ports"].as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!((ports(&web).len(), ports(&other).len()), (1, 1));
    assert_ne!(ports(&web), ports(&other));
    let table = command(&lab, &["status", "web", "--counters"]).stdout;
    assert!(table.contains("sent to the switch") && table.contains("rx_frames"), "{table}");
    // The machine decides about huge pages; a guest in mode `copy` has none.
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let allowed = setting.is_ok_and(|text| !text.contains("[never]") && !text.contains("[deny]"));
    let expected = if allowed { "huge" } else { "small" };
    assert_eq!((&web["pages"], &other["pages"]), (&"small".into(), &expected.into()));
    assert!(table.contains(" KiB in pages of 4 KiB\n"), "{table}");
    // Without a driver domain there is nothing to count.
    let alone = sleeper(&lab, "alone");
    assert_eq!(status("alone")["counters"]["ports"], serde_json::json!({}));
    let daemon = command(&lab, &["status", "--socket", "no-such-socket"]);
    assert!(daemon.stderr.contains("ringfence status GUEST"), "{}", daemon.stderr);
    drop((server.end(), client.end(), alone.end()));
    lab.assert_no_switch();
}

/// Client that knows the path of a launcher's socket and the protocol. It prints the kind of the answer.
const CLIENT: &str = "
import json, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(10)
got = b''
try:
    s.connect(sys.argv[1])
    try:
        s.send(b'\"Describe\"')
    except BrokenPipeError:
        pass
    # The kernel reports once that the launcher closed with a request unread, before the answer.
    try:
        got = s.recv(1 << 16)
    except ConnectionResetError:
        got = s.recv(1 << 16)
except OSError as error:
    print(type(error).__name__)
print('got', *(json.loads(got) if got else ['nothing']))";

/// Returns the sockets of launchers in the runtime directory.
fn guest_sockets(lab: &Lab) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lab.runtime_dir()).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|of| of == "guest")).collect()
}

#[test]
fn another_user_and_a_command_in_a_guest_do_not_reach_a_guest() {
    require!(
        Need::Guests,
        Need::Root,
        Need::Program("python3", "python3"),
        Need::Program("setpriv", "util-linux")
    );
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    let socket = guest_sockets(&lab).remove(0);
    let name = socket.to_str().unwrap();
    let own = lab.spawn(&["python3", "-c", CLIENT, name]).succeed(MOMENT);
    assert_eq!(own, "got Guest\n");
    let inside = lab.run("-q --switch none", &["python3", "-c", CLIENT, name]).succeed(MOMENT);
    assert_eq!(inside, "FileNotFoundError\ngot nothing\n");
    // A process of this user in another user namespace, as a command is that sees the directory all the same.
    let namespace = ["unshare", "--user", "--map-root-user", "python3", "-c", CLIENT, name];
    assert_eq!(lab.spawn(&namespace).succeed(MOMENT), "got Failed\n");
    // The user may not enter root's own directories.
    let path = "PATH=/usr/bin:/bin:/usr/sbin:/sbin";
    let other = ["env", path, "setpriv", "--reuid", OTHER_USER, "--clear-groups", "python3", "-c"];
    let other = || lab.spawn(&[&other[..], &[CLIENT, name]].concat()).succeed(MOMENT);
    assert_eq!(other(), "PermissionError\ngot nothing\n");
    // Launcher and client compare user ids, too.
    let session = lab.runtime_dir().parent().unwrap().to_owned();
    for path in [session.parent().unwrap(), &session, &lab.runtime_dir(), &socket] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let said = other();
    assert!(said.ends_with("got nothing\n") && !said.contains("Permission"), "{said}");
    guest.end();
}

#[test]
fn launcher_that_does_not_answer_is_named_and_hides_no_other_guest() {
    require!(Need::Guests);
    let lab = Lab::new();
    let (stopped, other) = (sleeper(&lab, "stopped"), sleeper(&lab, "other"));
    let pid = stopped.pid().as_raw_nonzero().to_string();
    rustix::process::kill_process(stopped.pid(), Signal::STOP).unwrap();
    let finished = command(&lab, &["ps", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 1, "{rows}");
    assert_eq!((finished.status, &rows[0]["name"]), (Some(1), &"other".into()));
    let named = format!("the guest of process {pid} does not answer");
    assert!(finished.stderr.contains(&named), "{}", finished.stderr);
    assert_eq!(command(&lab, &["exec", "other", "--", "echo", "here"]).stdout, "here\n");
    let unknown = command(&lab, &["exec", "stopped", "--", "true"]);
    assert_eq!(unknown.status, Some(125));
    assert!(unknown.stderr.contains(&named), "{}", unknown.stderr);
    rustix::process::kill_process(stopped.pid(), Signal::CONT).unwrap();
    assert!(eventually(MOMENT, || listed(&lab).as_array().unwrap().len() == 2));
    drop((stopped.end(), other.end()));
}

#[test]
fn flood_of_connections_keeps_neither_ps_nor_the_guest() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    let socket = guest_sockets(&lab).remove(0);
    let flood = "
import socket, sys, time
kept = []
# More than the launcher serves, and than wait in its queue.
while len(kept) < 600:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.setblocking(False)
    try:
        s.connect(sys.argv[1])
        kept.append(s)
    except OSError:
        time.sleep(0.001)
print('full', flush=True)
sys.stdin.read()
time.sleep(600)";
    let attacker = lab.spawn(&["python3", "-c", flood, socket.to_str().unwrap()]);
    attacker.wait_for_output("full");
    // Until the launcher has accepted those in its queue, a client finds the queue full.
    let listed = || command(&lab, &["ps"]);
    let is_refused = || listed().stderr.contains("it serves 320 clients already");
    assert!(eventually(MOMENT, is_refused), "{}", listed().stderr);
    let finished = listed();
    assert_eq!((finished.status, finished.stdout.lines().count()), (Some(1), 1));
    rustix::process::kill_process(attacker.pid(), Signal::KILL).unwrap();
    attacker.finish(MOMENT);
    assert!(eventually(MOMENT, || command(&lab, &["ps"]).stdout.contains("web")));
    guest.end();
}

#[test]
fn socket_of_a_process_in_another_user_namespace_is_no_launcher() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    let guest = sleeper(&lab, "web");
    let bind = "
import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
s.listen()
print('listens', flush=True)
s.accept()[0].recv(1)
print('asked', flush=True)";
    let path = lab.runtime_dir().join("1-1.guest");
    let words = ["unshare", "--user", "--map-root-user", "python3", "-c", bind];
    let fake = lab.spawn(&[&words[..], &[path.to_str().unwrap()]].concat());
    fake.wait_for_output("listens");
    let finished = command(&lab, &["ps"]);
    assert_eq!((finished.status, finished.stdout.lines().count()), (Some(1), 2));
    assert!(finished.stderr.contains("in another user namespace"), "{}", finished.stderr);
    // It got nothing but the end of the connection.
    fake.finish(MOMENT);
    guest.end();
}

#[test]
fn removed_runtime_directory_is_made_anew_with_guest_and_switch() {
    require!(Need::Guests, Need::Program("getent", "libc-bin"));
    let lab = Lab::new();
    let web = lab.run("-q --name web --switch blue --address 10.9.8.7/24", &["sleep", "1000"]);
    assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
    let names = || {
        let is_there = lab.runtime_dir().join("blue.sock").exists();
        is_there && !guest_sockets(&lab).is_empty()
    };
    for removes_directory in [true, false] {
        if removes_directory {
            // The launcher may make its socket anew before the directory is empty.
            let removed = || std::fs::remove_dir_all(lab.runtime_dir()).is_ok();
            assert!(eventually(MOMENT, removed));
        } else {
            std::fs::remove_file(lab.runtime_dir().join("blue.sock")).unwrap();
            std::fs::remove_file(guest_sockets(&lab).remove(0)).unwrap();
        }
        assert!(eventually(MOMENT, || lab.runtime_dir().exists() && names()));
        assert!(eventually(MOMENT, || listed(&lab)[0]["name"] == "web"));
        assert_eq!(command(&lab, &["exec", "web", "--", "echo", "here"]).stdout, "here\n");
        // A new guest finds the switch, and starts no other one of its name.
        let script = "getent hosts web; sleep 1000";
        let other = lab.run("-q --name other --switch blue", &["sh", "-c", script]);
        other.wait_for_output("10.9.8.7");
        assert!(!other.processes().iter().any(|process| process.is_role("driver")));
        other.end();
    }
    assert_eq!(command(&lab, &["stop", "web"]).status, Some(0));
    web.finish(MOMENT);
}

/// Returns `true` if a process has a socket, as a client of a launcher has. Its watch over guests is of another kind.
fn is_connected(process: rustix::process::Pid) -> bool {
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.any(|target| target.to_string_lossy().starts_with("socket:"))
}

#[test]
fn wait_returns_once_guest_runs_and_once_it_listens() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let lab = Lab::new();
    // The guest does not exist yet.
    let waiting = lab.spawn(&[lab.program(), "wait", "web"]);
    let for_port = lab.spawn(&[lab.program(), "wait", "--for", "port", "8000", "web"]);
    let guest = lab.script(
        "-q --name web --switch none",
        "until [ -e go ]; do sleep 0.01; done; exec python3 -m http.server 8000",
    );
    assert_eq!(waiting.succeed(MOMENT), "");
    // Whoever waited for the guest finds it.
    assert_eq!(command(&lab, &["status", "web"]).status, Some(0));
    let early = command(&lab, &["wait", "web", "--for", "port", "8000", "--timeout", "0"]);
    assert_eq!(early.status, Some(1));
    assert!(early.stderr.contains("`web` does not listen at port 8000"), "{}", early.stderr);
    std::fs::write(lab.file("go"), "").unwrap();
    for_port.succeed(MOMENT);
    let other = command(&lab, &["wait", "web", "--for", "port", "8001", "--timeout", "0"]);
    assert_eq!(other.status, Some(1));
    assert!(other.stderr.contains("it listens at 8000"), "{}", other.stderr);
    // A guest that ends while somebody waits is not waited for any longer.
    let waiting = lab.spawn(&[lab.program(), "wait", "web", "--for", "port", "8001"]);
    assert!(eventually(MOMENT, || is_connected(waiting.pid())));
    // By the end of another one, it has found the guest.
    for _ in 0..3 {
        let other = command(&lab, &["wait", "web", "--for", "port", "8001", "--timeout", "0"]);
        assert_eq!(other.status, Some(1));
    }
    assert_eq!(command(&lab, &["stop", "web"]).status, Some(0));
    let ended = waiting.finish(MOMENT);
    assert_eq!(ended.status, Some(1));
    guest.finish(MOMENT);
}

#[test]
fn guest_is_found_before_its_network_is_announced() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    // An ordinary user is not warned first.
    let site = Site::all().pop().unwrap();
    let sockets = site.lab.runtime_dir().join("*.guest");
    let mut wrapper = vec!["python3", "-c", WITH_FULL_PIPE, sockets.to_str().unwrap()];
    wrapper.extend(site.wrapper.iter().map(String::as_str));
    let guest = site.lab.start("--name web --switch blue", &["sleep", "600"], &wrapper);
    guest.wait_for_output("found");
    guest.wait_for_output("web is on switch `blue`");
    guest.finish(MOMENT);
}

#[test]
fn wait_for_a_guest_that_never_comes_has_status_1_and_errors_of_usage_125() {
    let lab = Lab::new();
    let late = command(&lab, &["wait", "web", "--timeout", "0"]);
    assert_eq!(late.status, Some(1));
    assert!(late.stderr.contains("no guest called `web`"), "{}", late.stderr);
    for words in [&["wait"][..], &["wait", "web", "--for", "rain"], &["wait", "--nosuch"]] {
        let refused = command(&lab, words);
        assert_eq!(refused.status, Some(125), "{words:?}: {}", refused.stderr);
    }
    let unknown = command(&lab, &["status", "web"]);
    assert_eq!(unknown.status, Some(125));
    assert!(unknown.stderr.contains("`ringfence wait web`"), "{}", unknown.stderr);
}
