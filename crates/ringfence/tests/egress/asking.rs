//! Approval while a guest runs (`--ask`): commands, programs at sockets and people who answer, and guests that try to answer
//! themselves.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use crate::support::egress::{CURL, DNSMASQ, LONG, Net, OPENSSL, OTHER_V4, THIRD_V4};
use crate::support::needs::Need;
use crate::support::screen::{SETSID, Screen};
use crate::support::world::{FAR_V4, HOST_V4};
use crate::support::{Running, eventually};
use crate::{net, require};

/// Writes a script for `--ask exec:./NAME`.
pub(super) fn script(net: &Net, name: &str, text: &str) {
    let path = net.world.file(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
}

/// Program of a test that answers at a socket.
struct Program(UnixListener);

/// Connection of one guest.
struct Guest(UnixStream, BufReader<UnixStream>);

impl Program {
    fn new(net: &Net, name: &str) -> Program {
        Program(UnixListener::bind(net.world.file(name)).unwrap())
    }

    fn accept(&self) -> Guest {
        let stream = self.0.accept().unwrap().0;
        Guest(stream.try_clone().unwrap(), BufReader::new(stream))
    }
}

impl Guest {
    fn read(&mut self) -> serde_json::Value {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn answer(&mut self, question: &serde_json::Value, answer: &str) {
        let line = serde_json::json!({ "question": question["question"], "answer": answer });
        writeln!(self.0, "{line}").unwrap();
    }
}

/// Returns the totals of the egress policy of a guest.
fn totals(net: &Net, guest: &str) -> serde_json::Value {
    let program = net.world.lab.program().to_owned();
    let text = net.world.host(&[&program, "status", guest, "--json"]).succeed(LONG);
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["egress"].clone()
}

/// Waits until a guest has printed a line. Returns its output.
fn output_with(guest: &Running, line: &str) -> String {
    guest.wait_for_output(line);
    guest.stdout.text()
}

#[test]
fn programs_wait_for_the_example_that_answers_and_go_on_or_fail() {
    require!(CURL, OPENSSL, DNSMASQ, Need::Program("git", "git"));
    let net = net!();
    let example = include_str!("../../../../docs/examples/ask.sh");
    script(&net, "ask.sh", &format!("set -- rules\n{example}"));
    // Two names share an address. A connection shows the name of the hello.
    std::fs::write(
        net.world.file("rules"),
        "a.test:443\na.test:80\na.test:22\nother.test:443\nother.test:80\n",
    )
    .unwrap();
    let script = format!(
        "curl -sS --max-time 60 --cacert cert.pem https://a.test/; \
         curl -sS --max-time 60 http://a.test/; \
         python3 -c 'import urllib.request as u; print(u.urlopen(\"http://other.test/\", timeout=60).read())'; \
         python3 egress.py send {FAR_V4} 22 hello; \
         set +e; curl -sS --max-time 60 https://b.test/; echo \"name $?\"; \
         curl -sS --max-time 60 --resolve b.test:443:{FAR_V4} https://b.test/; echo \"hello $?\"; \
         curl -sS --max-time 60 http://{THIRD_V4}:9000/; echo \"address $?\"; \
         python3 egress.py datagram {THIRD_V4} 443; \
         GIT_TERMINAL_PROMPT=0 git ls-remote https://b.test/x; echo \"git $?\""
    );
    let finished = net.world.lone_guest("--name asks --ask exec:./ask.sh", &script).finish(LONG);
    let output = format!("{}{}", finished.stdout, finished.stderr);
    assert_eq!(finished.stdout.matches("page\n").count(), 2, "{output}");
    assert!(output.contains("b'page\\n'") && output.contains("answered "), "{output}");
    for line in ["name 6", "hello 35", "address 7", "OSError ", "git 128"] {
        assert!(output.contains(line), "{line}: {output}");
    }
    for line in [
        "guest asks: approved a.test:443 for this run\n",
        "guest asks: denied b.test:443 for this run\n",
        "guest asks: denied 198.51.100.3:9000 for this run\n",
        "guest asks: denied 198.51.100.3:443/udp for this run\n",
        "guest asks: denied b.test, no rule, and denied when asked for (--ask); `--allow b.test:443`\n",
    ] {
        assert!(output.contains(line), "{line}: {output}");
    }
    assert_eq!(output.matches("denied b.test:443 for this run").count(), 1, "it is asked once");
    assert!(!net.was_asked_for("b.test"), "a name without an approval left the host");
    net.end();
}

#[test]
fn two_guests_ask_the_example_program_at_a_time() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let example = include_str!("../../../../docs/examples/ask.py");
    std::fs::write(net.world.file("ask.py"), example).unwrap();
    let program =
        net.world.host(&["python3", "ask.py", "ask.socket", "other.test:443", "other.test:80"]);
    assert!(eventually(LONG, || net.world.file("ask.socket").exists()));
    let ask =
        |url: &str| format!("curl -sS --max-time 60 {url}; echo \"status $?\"; exec sleep 60");
    let start = |name: &str, url: &str| {
        let options = format!("--name {name} --ask socket:ask.socket --ask-within 60");
        net.world.lone_guest(&options, &format!("set +e; {}", ask(url)))
    };
    let guests = [start("one", "http://other.test/"), start("two", "http://a.test/")];
    assert!(output_with(&guests[0], "status 0").contains("page\n"));
    output_with(&guests[1], "status 6");
    for line in ["one other.test:443 run\n", "two a.test:443 deny\n"] {
        assert!(eventually(LONG, || program.stdout.text().contains(line)), "{line}");
    }
    guests.into_iter().for_each(|guest| drop(guest.end()));
    drop(program.end());
    net.end();
}

#[test]
fn approval_of_one_guest_opens_nothing_for_another_and_late_answers_are_counted() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let program = Program::new(&net, "ask.socket");
    let script =
        "set +e; curl -sS --max-time 60 http://other.test/; echo \"status $?\"; exec sleep 60";
    let start = |name: &str| {
        let options = format!("--name {name} --ask socket:ask.socket --ask-within 60");
        net.world.lone_guest(&options, script)
    };
    let one = start("one");
    let mut of_one = program.accept();
    let first = of_one.read();
    assert_eq!((&first["guest"], &first["rule"]), (&"one".into(), &"other.test:443".into()));
    let two = start("two");
    let mut of_two = program.accept();
    let second = of_two.read();
    assert_ne!(first["question"], second["question"]);
    // The answer to the first guest's question reaches the second one.
    for answer in ["run", "once", "always"] {
        of_two.answer(&first, answer);
    }
    assert!(eventually(LONG, || totals(&net, "two")["answers_ignored"] == 3));
    assert!(!net.was_asked_for("other.test"));
    of_one.answer(&first, "deny");
    of_one.answer(&first, "run");
    output_with(&one, "status 6");
    assert!(eventually(LONG, || totals(&net, "one")["answers_ignored"] == 1));
    of_two.answer(&second, "once");
    // The connection has a question of its own: the port is another one.
    let port = of_two.read();
    assert_eq!(port["rule"], "other.test:80");
    of_two.answer(&port, "once");
    assert!(output_with(&two, "status 0").contains("page\n"));
    assert_eq!(totals(&net, "two")["questions"], 2);
    drop((one.end(), two.end()));
    net.end();
}

#[test]
fn guest_that_makes_the_socket_of_the_program_answers_nothing() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let liar = "import json, socket\nserver = socket.socket(socket.AF_UNIX)\n\
                server.bind('ask.socket')\nserver.listen()\nprint('bound', flush=True)\nopen('bound', 'w').close()\nwhile True:\n  peer = server.accept()[0].makefile('rw')\n  \
                for line in peer:\n    print('asked', flush=True)\n    \
                answer = {'question': json.loads(line)['question'], 'answer': 'run'}\n    \
                print(json.dumps(answer), file=peer, flush=True)\n";
    std::fs::write(net.world.file("liar.py"), liar).unwrap();
    let script = "python3 liar.py & liar=$!; while ! [ -e bound ]; do sleep 0.05; done; set +e; \
         curl -sS --max-time 60 http://other.test/; echo \"status $?\"; kill $liar";
    let finished = net.world.lone_guest("--name liar --ask socket:ask.socket", script).finish(LONG);
    let output = format!("{}{}", finished.stdout, finished.stderr);
    assert!(output.contains("bound\n") && output.contains("status 6\n"), "{output}");
    assert!(!output.contains("asked\n"), "{output}");
    assert!(output.contains("of another user or in a container"), "{output}");
    net.end();
}

#[test]
fn destination_is_denied_at_once_when_nobody_can_answer() {
    require!(CURL, OPENSSL, DNSMASQ, SETSID);
    let net = net!();
    script(&net, "silent.sh", "exit 1");
    let script = "set +e; curl -sS --max-time 60 http://other.test/; echo \"status $?\"; \
         curl -sS --max-time 60 http://a.test/";
    for ask in ["terminal", "exec:./silent.sh", "exec:./missing", "socket:missing"] {
        let options = format!(
            "run --uplink host --switch none --name alone --ask {ask} --ask-within 3600 --allow a.test:80 -- sh -ec"
        );
        // The terminal of whoever runs the tests answers nothing.
        let program = net.world.lab.program().to_owned();
        let mut words = vec!["setsid", "--wait", &program];
        words.extend(options.split(' ').chain([script]));
        let finished = net.world.host(&words).finish(LONG);
        let output = format!("{}{}", finished.stdout, finished.stderr);
        assert!(output.contains("status 6\n") && finished.stdout.ends_with("page\n"), "{output}");
        assert!(
            output.contains("denied other.test, no rule, and nobody to ask (--ask)"),
            "{output}"
        );
        let files = format!("socket:{}", net.world.file("").display());
        assert!(output.contains(&format!("--ask {}", ask.replace("socket:", &files))), "{output}");
    }
    for (options, problem) in [
        ("--ask sometimes", "say `terminal`, `exec:COMMAND` or `socket:PATH`"),
        ("--ask terminal --egress-learn x", "nothing to ask about"),
        ("--ask terminal --terminal shared", "could type the answers itself"),
        ("--ask-within 5", "--ask"),
    ] {
        let finished = net.world.lone_guest(options, "true").finish(LONG);
        assert!(
            finished.status != Some(0) && finished.stderr.contains(problem),
            "{}",
            finished.stderr
        );
    }
    net.end();
}

#[test]
fn question_without_answer_is_denied_after_the_limit() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let program = Program::new(&net, "ask.socket");
    let script =
        "set +e; curl -sS --max-time 60 http://other.test/; echo \"status $?\"; exec sleep 60";
    let guest = net.world.lone_guest("--name late --ask socket:ask.socket --ask-within 1", script);
    let mut connection = program.accept();
    let question = connection.read();
    output_with(&guest, "status 6");
    assert_eq!(connection.read()["end"], question["question"]);
    connection.answer(&question, "run");
    assert!(eventually(LONG, || totals(&net, "late")["answers_ignored"] == 1));
    guest.wait_for_error("denied other.test, no rule, and no answer in time");
    drop(guest.end());
    net.end();
}

#[test]
fn metadata_own_and_rebinding_addresses_open_by_no_approval() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    script(&net, "yes.sh", "echo \"$RINGFENCE_ASK_RULE\" >> asked\ncat answer");
    let server = net.world.host(&["python3", "-m", "http.server", "--bind", HOST_V4, "8000"]);
    let script = format!(
        "set +e; for url in 169.254.169.254 {HOST_V4}:8000 rebind.test metadata.test 100.100.100.200; do \
         curl -sS --max-time 30 http://$url/ >/dev/null; echo \"$url $?\"; done; curl -sS --max-time 60 http://other.test/"
    );
    // With the host's address as its own, the guest would connect to itself.
    let options = format!(
        "--name yes --policy mine.toml --ask exec:./yes.sh --uplink-address private --allow-local {HOST_V4} \
         --allow-local 169.254.169.254"
    );
    for answer in ["once", "run", "always"] {
        let write = |name: &str, text: &str| std::fs::write(net.world.file(name), text).unwrap();
        write("answer", answer);
        write("asked", "");
        write("mine.toml", "allow = ['a.test:80']\n");
        let finished = net.world.lone_guest(&options, &script).finish(LONG);
        let output = format!("{}{}", finished.stdout, finished.stderr);
        for line in [
            "169.254.169.254 7\n",
            "192.0.2.2:8000 7\n",
            "rebind.test 6\n",
            "metadata.test 6\n",
            "100.100.100.200 7\n",
        ] {
            assert!(output.contains(line), "{answer}: {line}: {output}");
        }
        assert!(finished.stdout.ends_with("page\n"), "{answer}: {output}");
        let asked = net.world.lab.read("asked");
        let mut asked: Vec<_> = asked.lines().collect();
        asked.sort_unstable();
        let names = ["metadata.test:443", "other.test:443", "other.test:80", "rebind.test:443"];
        assert_eq!(asked, names, "{answer}");
        let kept = net.world.lab.read("mine.toml");
        assert!(!kept.contains("169.254") && !kept.contains("192.0.2"), "{answer}: {kept}");
        assert_eq!(kept.contains("other.test:80"), answer == "always", "{kept}");
    }
    drop(server.end());
    net.end();
}

#[test]
fn flood_of_names_asks_few_at_a_time_and_blocks_nothing_that_is_allowed() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    script(&net, "slow.sh", "echo x >> started\nexec sleep 1000");
    let script = "for i in $(seq 60); do getent ahosts n$i.test >/dev/null & done; \
         while [ \"$(wc -l < started)\" -lt 8 ]; do sleep 0.05; done; \
         for i in 1 2 3; do curl -sS --max-time 60 http://a.test/; done; echo done; exec sleep 60";
    std::fs::write(net.world.file("started"), "").unwrap();
    let options = "--name flood -q --ask exec:./slow.sh --ask-within 3600 --allow a.test:80";
    let guest = net.world.lone_guest(options, script);
    let output = output_with(&guest, "done\n");
    assert_eq!(output.matches("page\n").count(), 3, "{output}");
    let started = std::fs::read_to_string(net.world.file("started")).unwrap();
    assert_eq!(started.lines().count(), 8);
    drop(guest.end());
    net.end();
}

#[test]
fn approval_for_ever_is_in_the_policy_file_of_the_next_run() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    script(&net, "always.sh", "echo '{\"answer\":\"always\"}'");
    std::fs::write(
        net.world.file("mine.toml"),
        "# mine\nallow = [\n    \"a.test:80\",  # first\n]\n",
    )
    .unwrap();
    let script = "curl -sS --max-time 60 http://other.test/";
    let options = "--name grows --policy mine.toml --ask exec:./always.sh";
    assert_eq!(net.guest(options, script), "page\n");
    let text = std::fs::read_to_string(net.world.file("mine.toml")).unwrap();
    assert_eq!(
        text,
        "# mine\nallow = [\n    \"other.test:80\",\n    \"other.test:443\",\n    \"a.test:80\",  # first\n]\n"
    );
    assert_eq!(net.guest("--name next --policy mine.toml", script), "page\n");
    net.end();
}

#[test]
#[ignore = "long: one more kind of a replaced policy"]
fn other_policy_ends_the_connections_that_an_approval_has_opened() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    script(&net, "yes.sh", "echo run");
    let script = format!(
        "set +e; python3 -c 'import socket\nc = socket.create_connection((\"{OTHER_V4}\", 9000)); c.sendall(b\"x\")\n\
         print(\"open\", flush=True)\ntry: c.recv(1)\nexcept OSError: print(\"ended\", flush=True)'; exec sleep 60"
    );
    let guest = net.world.lone_guest("--name set --ask exec:./yes.sh", &script);
    guest.wait_for_output("open\n");
    std::fs::write(net.world.file("other.toml"), "allow = ['a.test:80']\n").unwrap();
    let program = net.world.lab.program().to_owned();
    net.world.host(&[&program, "policy", "set", "set", "other.toml"]).succeed(LONG);
    guest.wait_for_output("ended\n");
    drop(guest.end());
    net.end();
}

#[test]
fn person_at_the_terminal_approves_and_keys_before_the_question_do_not() {
    require!(CURL, OPENSSL, DNSMASQ, SETSID);
    let net = net!();
    let program = net.world.lab.program().to_owned();
    let script = "printf '\\033]0;'; curl -sS --max-time 60 http://other.test/; curl -sS --max-time 60 http://b.test/; \
         echo \"status $?\"; cat";
    let words = [
        &*program,
        "run",
        "--uplink",
        "host",
        "--switch",
        "none",
        "--name",
        "person",
        "--ask",
        "terminal",
        "--ask-within",
        "600",
        "--",
        "sh",
        "-c",
        script,
    ];
    let words = net.world.host_words(&words);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut screen = Screen::start(&net.world.lab, &words);
    // Typed for the command, before there is a question.
    screen.press("r\r");
    screen.expect("guest person wants other.test:443");
    screen.expect("r for this run, d deny, then Enter (600 s): ");
    let answer = |screen: &mut Screen, keys: &str| {
        // Keys that come with the question are dropped.
        std::thread::sleep(std::time::Duration::from_millis(800));
        screen.press(keys);
    };
    answer(&mut screen, "x\r");
    screen.expect("guest person wants other.test:443");
    answer(&mut screen, "r\r");
    screen.expect("approved other.test:443 for this run");
    screen.expect("guest person wants other.test:80");
    answer(&mut screen, "o\r");
    screen.expect("page");
    screen.expect("guest person wants b.test:443");
    answer(&mut screen, "d\r");
    screen.expect("denied b.test:443 for this run");
    screen.expect("status 6");
    // The keys are the command's again.
    screen.type_to_cat("typed");
    screen.press("\x04");
    assert_eq!(screen.finish(), 0);
    net.end();
}
