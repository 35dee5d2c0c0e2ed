//! Random sessions of three clients against a reference model: a flat map, cloned for each transaction.
//!
//! A commit is checked by its guarantee, independent of the implementation. If the server commits, then
//! every request of the transaction, repeated on the model as it was right before the commit, must give
//! the same reply. The result of these requests is the new model. If the server returns `EAGAIN`, another
//! client must have changed the store during the transaction.

use super::*;
use std::collections::BTreeSet;

const NODES: usize = 7;
const SLOTS: usize = 2;
/// Toolstack, and two unprivileged guests.
const DOMAINS: [u16; 3] = [0, 1, 2];

#[derive(Clone, Debug)]
enum Op {
    Write(String, u8),
    Mkdir(String),
    Rm(String),
    SetPerms(String, String),
    Read(String),
    Directory(String),
    GetPerms(String),
}

#[derive(Clone, Debug)]
enum Step {
    /// Request by a client, directly or in the transaction of a slot.
    Do(usize, Option<usize>, Op),
    Start(usize, usize),
    End(usize, usize, bool),
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Node {
    value: Vec<u8>,
    permissions: Vec<(char, u16)>,
}

/// Nodes of the whole store by path.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Model(BTreeMap<String, Node>);

fn parent(path: &str) -> Option<String> {
    let cut = path.rfind('/')?;
    match (cut, path.len()) {
        (0, 1) => None,
        (0, _) => Some("/".into()),
        _ => Some(path[..cut].into()),
    }
}

fn below(path: &str, ancestor: &str) -> bool {
    path != ancestor && (ancestor == "/" || path.starts_with(&format!("{ancestor}/")))
}

impl Model {
    fn new() -> Model {
        let root = Node { value: vec![], permissions: vec![('n', 0)] };
        Model(BTreeMap::from([("/".into(), root)]))
    }

    fn letter(&self, domain: u16, path: &str) -> char {
        let list = &self.0[path].permissions;
        if domain == 0 || list[0].1 == domain {
            return 'b';
        }
        list[1..].iter().find(|entry| entry.1 == domain).unwrap_or(&list[0]).0
    }

    fn check(&self, domain: u16, path: &str, needed: char) -> Result<(), ErrorName> {
        let mut nearest = path.to_owned();
        while !self.0.contains_key(&nearest) {
            nearest = parent(&nearest).unwrap();
        }
        let letter = self.letter(domain, &nearest);
        match (letter == needed || letter == 'b', nearest == path) {
            (false, _) => Err(ErrorName::Access),
            (true, false) => Err(ErrorName::NotFound),
            (true, true) => Ok(()),
        }
    }

    fn owned(&self, domain: u16) -> usize {
        self.0.values().filter(|node| node.permissions[0].1 == domain).count()
    }

    fn make(&mut self, domain: u16, path: &str) -> Result<(), ErrorName> {
        let mut missing = Vec::new();
        let mut nearest = path.to_owned();
        while !self.0.contains_key(&nearest) {
            missing.push(nearest.clone());
            nearest = parent(&nearest).unwrap();
        }
        if domain != 0 && self.owned(domain) + missing.len() > NODES {
            return Err(ErrorName::NoSpace);
        }
        let mut permissions = self.0[&nearest].permissions.clone();
        if domain != 0 {
            permissions[0].1 = domain;
        }
        for path in missing {
            self.0.insert(path, Node { value: vec![], permissions: permissions.clone() });
        }
        Ok(())
    }

    fn run(&mut self, domain: u16, op: &Op) -> Answer {
        let ok = || Ok(b"OK\0".to_vec());
        match op {
            Op::Read(path) => {
                self.check(domain, path, 'r')?;
                Ok(self.0[path].value.clone())
            }
            Op::GetPerms(path) => {
                self.check(domain, path, 'r')?;
                let list = &self.0[path].permissions;
                let list: String = list.iter().map(|(c, n)| format!("{c}{n}\0")).collect();
                Ok(list.into_bytes())
            }
            Op::Directory(path) => {
                self.check(domain, path, 'r')?;
                let children = self.0.keys().filter(|key| parent(key).as_ref() == Some(path));
                let names = children.map(|key| format!("{}\0", key.rsplit('/').next().unwrap()));
                Ok(names.collect::<String>().into_bytes())
            }
            Op::Mkdir(path) => match self.check(domain, path, 'w') {
                Err(ErrorName::NotFound) => self.make(domain, path).and_then(|()| ok()),
                answer => answer.and_then(|()| ok()),
            },
            Op::Write(path, value) => {
                match self.check(domain, path, 'w') {
                    Err(ErrorName::NotFound) => self.make(domain, path)?,
                    answer => answer?,
                }
                self.0.get_mut(path).unwrap().value = vec![*value];
                ok()
            }
            Op::Rm(path) => match self.check(domain, path, 'w') {
                Ok(()) if path == "/" => Err(ErrorName::Invalid),
                Ok(()) => {
                    self.0.retain(|key, _| key != path && !below(key, path));
                    ok()
                }
                Err(ErrorName::NotFound) if self.0.contains_key(&parent(path).unwrap()) => ok(),
                Err(error) => Err(error),
            },
            Op::SetPerms(path, list) => {
                self.check(domain, path, 'w')?;
                let new: Vec<(char, u16)> = list
                    .split(' ')
                    .map(|e| (e.chars().next().unwrap(), e[1..].parse().unwrap()))
                    .collect();
                let node = self.0.get_mut(path).unwrap();
                let owner = node.permissions[0].1;
                if domain != 0 && owner != domain {
                    return Err(ErrorName::Access);
                }
                if domain != 0 && new[0].1 != owner {
                    return Err(ErrorName::NotPermitted);
                }
                node.permissions = new;
                ok()
            }
        }
    }
}

/// Open transaction in the model: its copy of the nodes, its requests and their replies.
struct Open {
    id: u32,
    copy: Model,
    started: usize,
    requests: Vec<(Op, Answer)>,
}

struct ModelSession {
    store: TestStore,
    clients: Vec<ConnectionId>,
    watcher: ConnectionId,
    model: Model,
    /// Number of steps that wrote to the store.
    changes: usize,
    open: BTreeMap<(usize, usize), Open>,
}

fn request_for<R>(op: &Op, then: impl FnOnce(&StoreRequest<'_>) -> R) -> R {
    match op {
        Op::Write(path, value) => then(&StoreRequest::Write { path: at(path), value: &[*value] }),
        Op::Mkdir(path) => then(&StoreRequest::Mkdir { path: at(path) }),
        Op::Rm(path) => then(&StoreRequest::Rm { path: at(path) }),
        Op::SetPerms(path, list) => {
            then(&StoreRequest::SetPerms { path: at(path), permissions: permissions(list) })
        }
        Op::Read(path) => then(&StoreRequest::Read { path: at(path) }),
        Op::Directory(path) => then(&StoreRequest::Directory { path: at(path) }),
        Op::GetPerms(path) => then(&StoreRequest::GetPerms { path: at(path) }),
    }
}

impl ModelSession {
    fn new() -> ModelSession {
        let mut store = TestStore::with(Limits { nodes: NODES, ..Limits::default() });
        let clients =
            DOMAINS.map(|domain| store.server.connect(DomId(domain), domain == 0).unwrap());
        let watcher = store.toolstack();
        store.watch(watcher, "/", "all").unwrap();
        store.watch(watcher, "/a/b", "one").unwrap();
        store.events(watcher);
        let clients = clients.to_vec();
        ModelSession {
            store,
            clients,
            watcher,
            model: Model::new(),
            changes: 0,
            open: BTreeMap::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        let before = self.model.clone();
        let changed = match step {
            Step::Do(client, None, op) => self.directly(*client, op),
            Step::Do(client, Some(slot), op) => {
                self.inside(*client, *slot, op);
                BTreeSet::new()
            }
            Step::Start(client, slot) => {
                self.start(*client, *slot);
                BTreeSet::new()
            }
            Step::End(client, slot, commit) => self.end(*client, *slot, *commit),
        };
        // Writing the present value is a change too: it fires watches and causes conflicts.
        if self.model != before || !changed.is_empty() {
            self.changes += 1;
        }
        self.check_events(&before, &changed);
        self.store.server.audit().unwrap();
    }

    fn directly(&mut self, client: usize, op: &Op) -> BTreeSet<(String, bool)> {
        let before = self.model.clone();
        let expected = self.model.run(DOMAINS[client], op);
        let answer = request_for(op, |request| self.store.ask(self.clients[client], 0, request));
        assert_eq!(answer, expected, "{op:?} by {client}");
        changed_by(op, &answer, &before).into_iter().collect()
    }

    fn inside(&mut self, client: usize, slot: usize, op: &Op) {
        let Some(open) = self.open.get_mut(&(client, slot)) else {
            return;
        };
        let expected = open.copy.run(DOMAINS[client], op);
        let (id, tx) = (self.clients[client], open.id);
        let answer = request_for(op, |request| self.store.ask(id, tx, request));
        assert_eq!(answer, expected, "{op:?} by {client} in a transaction");
        open.requests.push((op.clone(), answer));
    }

    fn start(&mut self, client: usize, slot: usize) {
        if !self.open.contains_key(&(client, slot)) {
            let id = self.store.start(self.clients[client]).unwrap();
            let (copy, started) = (self.model.clone(), self.changes);
            self.open.insert((client, slot), Open { id, copy, started, requests: Vec::new() });
        }
    }

    fn end(&mut self, client: usize, slot: usize, commit: bool) -> BTreeSet<(String, bool)> {
        let Some(open) = self.open.remove(&(client, slot)) else {
            return BTreeSet::new();
        };
        let outcome = self.store.end(self.clients[client], open.id, commit);
        if !commit {
            assert_eq!(outcome, Ok(()));
            return BTreeSet::new();
        }
        let mut replayed = self.model.clone();
        let mut changed = BTreeSet::new();
        let again: Vec<Answer> = open
            .requests
            .iter()
            .map(|(op, _)| {
                let before = replayed.clone();
                let answer = replayed.run(DOMAINS[client], op);
                changed.extend(changed_by(op, &answer, &before));
                answer
            })
            .collect();
        match outcome {
            Ok(()) => {
                let changes =
                    open.requests.iter().any(|(op, answer)| mutates(op) && answer.is_ok());
                if changes {
                    let given: Vec<_> =
                        open.requests.into_iter().map(|(_, answer)| answer).collect();
                    assert_eq!(given, again, "replies hold at the time of the commit");
                    self.model = replayed;
                    return changed;
                }
            }
            Err(ErrorName::Again) => {
                assert!(self.changes > open.started, "a conflict without a change");
            }
            Err(error) => {
                assert_eq!(error, ErrorName::NoSpace);
                assert!(again.contains(&Err(ErrorName::NoSpace)), "no quota was reached");
            }
        }
        BTreeSet::new()
    }

    /// Compares the events of a toolstack that watches all nodes, and one node, with the changes.
    fn check_events(&mut self, before: &Model, changed: &BTreeSet<(String, bool)>) {
        let mut expected = BTreeSet::new();
        for (path, removed) in changed {
            expected.insert((path.clone(), "all".to_owned()));
            if path == "/a/b" || below(path, "/a/b") {
                expected.insert((path.clone(), "one".to_owned()));
            } else if *removed && below("/a/b", path) && before.0.contains_key("/a/b") {
                expected.insert(("/a/b".to_owned(), "one".to_owned()));
            }
        }
        let events: BTreeSet<_> = self.store.events(self.watcher).into_iter().collect();
        assert_eq!(events, expected);
    }

    /// Checks that a toolstack reads the contents of the model from the store.
    fn compare(&mut self) {
        let paths: Vec<String> = self.model.0.keys().cloned().collect();
        for path in paths {
            let toolstack = self.clients[0];
            for op in [Op::Read(path.clone()), Op::Directory(path.clone()), Op::GetPerms(path)] {
                let answer = request_for(&op, |request| self.store.ask(toolstack, 0, request));
                assert_eq!(answer, self.model.run(0, &op), "{op:?}");
            }
        }
        for domain in DOMAINS {
            assert_eq!(self.store.server.nodes_of(DomId(domain)), self.model.owned(domain));
        }
    }
}

fn mutates(op: &Op) -> bool {
    matches!(op, Op::Write(..) | Op::Mkdir(..) | Op::Rm(..) | Op::SetPerms(..))
}

/// Returns the path that a request changed, and `true` if the node was removed.
fn changed_by(op: &Op, answer: &Answer, before: &Model) -> Option<(String, bool)> {
    answer.as_ref().ok()?;
    let there = |path: &String| before.0.contains_key(path);
    match op {
        Op::Write(path, _) | Op::SetPerms(path, _) => Some((path.clone(), false)),
        Op::Mkdir(path) => (!there(path)).then(|| (path.clone(), false)),
        Op::Rm(path) => there(path).then(|| (path.clone(), true)),
        _ => None,
    }
}

fn path() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    prop::collection::vec(name, 0..4).prop_map(|names| format!("/{}", names.join("/")))
}

fn op() -> impl Strategy<Value = Op> {
    let lists = ["n0", "b0", "r0 b1", "n1 r2", "w2", "b2 n1", "n0 w1 b2"];
    let list = prop::sample::select(lists.map(str::to_owned).to_vec());
    prop_oneof![
        4 => (path(), any::<u8>()).prop_map(|(path, value)| Op::Write(path, value)),
        2 => path().prop_map(Op::Mkdir),
        2 => path().prop_map(Op::Rm),
        3 => (path(), list).prop_map(|(path, list)| Op::SetPerms(path, list)),
        2 => path().prop_map(Op::Read),
        1 => path().prop_map(Op::Directory),
        1 => path().prop_map(Op::GetPerms),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..DOMAINS.len();
    prop_oneof![
        6 => (client.clone(), op()).prop_map(|(client, op)| Step::Do(client, None, op)),
        6 => (client.clone(), 0..SLOTS, op())
            .prop_map(|(client, slot, op)| Step::Do(client, Some(slot), op)),
        2 => (client.clone(), 0..SLOTS).prop_map(|(client, slot)| Step::Start(client, slot)),
        2 => (client, 0..SLOTS, prop::bool::weighted(0.8))
            .prop_map(|(client, slot, commit)| Step::End(client, slot, commit)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn random_sessions_agree_with_reference_model(steps in prop::collection::vec(step(), 1..80)) {
        let mut run = ModelSession::new();
        // Gives the guests access to the root, so that not every request is refused.
        run.step(&Step::Do(0, None, Op::SetPerms("/".into(), "b0".into())));
        for step in &steps {
            run.step(step);
        }
        run.compare();
    }
}
