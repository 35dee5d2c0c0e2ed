//! What the server does with each request.

use super::{Connection, ConnectionId, StoreServer};
use crate::access::{Change, Mutation};
use crate::path::NodePath;
use crate::quota::{Quota, Refusal, TOKEN_MAX};
use crate::transaction::Transaction;
use crate::tree::{Node, Tree};
use crate::watch::Watch;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    ErrorName, Header, MessageType, PAYLOAD_MAX, Path, PathError, Request, WatchPath, domain_path,
    emit_permissions,
};
use std::sync::Arc;

/// The answer to a request, and what follows from it once it is queued.
pub(super) struct Answer {
    pub(super) payload: Vec<u8>,
    pub(super) then: Then,
}

/// What follows from an answer.
pub(super) enum Then {
    Nothing,
    /// The tree was this one, and these nodes changed.
    Changed(Tree, Vec<Change>),
    /// A watch was set; its name and token.
    Watching(String, Box<[u8]>),
}

impl Answer {
    fn with(payload: Vec<u8>) -> Answer {
        Answer { payload, then: Then::Nothing }
    }

    fn ok_then(then: Then) -> Answer {
        Answer { payload: b"OK\0".to_vec(), then }
    }

    fn ok() -> Answer {
        Answer::ok_then(Then::Nothing)
    }
}

impl StoreServer {
    /// Does one request; the answer's effects on watches are the caller's affair.
    pub(super) fn answer(
        &mut self,
        id: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) -> Result<Answer, Refusal> {
        let actor = self.connection(id)?.actor;
        let request = Request::parse(header.kind, payload).map_err(|error| {
            let name = error.error_name();
            let reserved = name == ErrorName::NotImplemented && for_toolstacks(header.kind);
            if reserved && !actor.privileged { ErrorName::Access } else { name }
        })?;
        let tx = header.tx_id;
        let at = |path: Path<'_>| NodePath::resolve(path, actor.domain).map_err(invalid);
        match request {
            Request::Directory { path } => self.read(id, tx, &at(path)?, directory),
            Request::DirectoryPart { path, offset } => {
                self.read(id, tx, &at(path)?, |node| directory_part(node, offset))
            }
            Request::Read { path } => {
                self.read(id, tx, &at(path)?, |node| Ok(node.value().to_vec()))
            }
            Request::GetPerms { path } => self.read(id, tx, &at(path)?, |node| {
                let mut list = Vec::new();
                emit_permissions(node.permissions(), &mut list);
                Ok(list)
            }),
            Request::Write { path, value } => {
                self.mutate(id, tx, Mutation::Write(at(path)?, Arc::from(value)))
            }
            Request::Mkdir { path } => self.mutate(id, tx, Mutation::Make(at(path)?)),
            Request::Rm { path } => self.mutate(id, tx, Mutation::Remove(at(path)?)),
            Request::SetPerms { path, permissions } => {
                self.mutate(id, tx, Mutation::SetPermissions(at(path)?, permissions))
            }
            Request::Watch { path, token, depth } => self.watch(id, path, token, depth),
            Request::Unwatch { path, token } => self.unwatch(id, path, token),
            Request::ResetWatches => self.reset(id),
            Request::TransactionStart => self.start_transaction(id, tx),
            Request::TransactionEnd { commit } => self.end_transaction(id, tx, commit),
            Request::GetDomainPath { domain } => {
                Ok(Answer::with(format!("{}\0", domain_path(domain)).into()))
            }
            Request::IsDomainIntroduced { domain } => {
                let known = self.introduced.contains(&domain);
                Ok(Answer::with(if known { b"T\0" } else { b"F\0" }.to_vec()))
            }
        }
    }

    fn connection(&mut self, id: ConnectionId) -> Result<&mut Connection, ErrorName> {
        // Asked for only while its request is handled, so it is there.
        self.connections.get_mut(&id).ok_or(ErrorName::Io)
    }

    /// Answers from the node at `path`, as the transaction `tx` (0: nobody) sees it.
    fn read(
        &mut self,
        id: ConnectionId,
        tx: u32,
        path: &NodePath,
        answer: impl FnOnce(&Node) -> Result<Vec<u8>, ErrorName>,
    ) -> Result<Answer, Refusal> {
        let connection = self.connections.get_mut(&id).ok_or(ErrorName::Io)?;
        let actor = connection.actor;
        let tree = if tx == 0 {
            &self.tree
        } else {
            let open = connection.transactions.get_mut(&tx);
            let open = open.ok_or(ErrorName::NotFound)?;
            open.look_at(path, actor, &self.limits)?
        };
        Ok(Answer::with(answer(actor.read(tree, path)?)?))
    }

    fn mutate(&mut self, id: ConnectionId, tx: u32, mutation: Mutation) -> Result<Answer, Refusal> {
        let connection = self.connections.get_mut(&id).ok_or(ErrorName::Io)?;
        let actor = connection.actor;
        if tx != 0 {
            let open = connection.transactions.get_mut(&tx);
            let open = open.ok_or(ErrorName::NotFound)?;
            open.apply(mutation, actor, &self.limits)?;
            return Ok(Answer::ok());
        }
        let before = self.tree.clone();
        let mut changes = Vec::new();
        mutation.apply(&mut self.tree, actor, &self.limits, &mut changes)?;
        Ok(Answer::ok_then(Then::Changed(before, changes)))
    }

    fn watch(
        &mut self,
        id: ConnectionId,
        path: WatchPath<'_>,
        token: &[u8],
        depth: Option<u32>,
    ) -> Result<Answer, Refusal> {
        let actor = self.connection(id)?.actor;
        let place = watch_place(path, actor.domain)?;
        if token.len() > TOKEN_MAX {
            return Err(ErrorName::Invalid.into());
        }
        if self.watches.contains(&place, id, token) {
            return Err(ErrorName::Exists.into());
        }
        if !actor.privileged && self.watches.count(actor.domain) >= self.limits.watches {
            return Err(Quota::Watches.into());
        }
        let watch = Watch {
            connection: id,
            actor,
            token: token.into(),
            depth,
            relative: matches!(path, WatchPath::Node(path) if !path.is_absolute()),
        };
        self.watches.insert(&place, watch);
        let event = Then::Watching(path.as_str().to_owned(), token.into());
        Ok(Answer::ok_then(event))
    }

    fn unwatch(
        &mut self,
        id: ConnectionId,
        path: WatchPath<'_>,
        token: &[u8],
    ) -> Result<Answer, Refusal> {
        let place = watch_place(path, self.connection(id)?.actor.domain)?;
        if self.watches.remove(&place, id, token) {
            Ok(Answer::ok())
        } else {
            Err(ErrorName::NotFound.into())
        }
    }

    fn reset(&mut self, id: ConnectionId) -> Result<Answer, Refusal> {
        self.connection(id)?.transactions.clear();
        self.watches.remove_all(id);
        self.leave_exclusive(id, None);
        Ok(Answer::ok())
    }

    fn start_transaction(&mut self, id: ConnectionId, tx: u32) -> Result<Answer, Refusal> {
        let actor = self.connection(id)?.actor;
        if tx != 0 {
            let nested = self.connection(id)?.transactions.contains_key(&tx);
            let error = if nested { ErrorName::Busy } else { ErrorName::NotFound };
            return Err(error.into());
        }
        let open = self.of_domain(actor.domain);
        let open: usize = open.map(|(_, each)| each.transactions.len()).sum();
        if !actor.privileged && open >= self.limits.transactions {
            return Err(Quota::Transactions.into());
        }
        let transaction = Transaction::new(&self.tree);
        let connection = self.connection(id)?;
        let mut new = connection.next_transaction;
        while new == 0 || connection.transactions.contains_key(&new) {
            new = new.wrapping_add(1);
        }
        connection.next_transaction = new.wrapping_add(1);
        connection.transactions.insert(new, transaction);
        if connection.conflicted && self.exclusive.is_none() {
            self.exclusive = Some((id, new));
        }
        Ok(Answer::with(format!("{new}\0").into()))
    }

    fn end_transaction(
        &mut self,
        id: ConnectionId,
        tx: u32,
        commit: bool,
    ) -> Result<Answer, Refusal> {
        self.leave_exclusive(id, Some(tx));
        let connection = self.connections.get_mut(&id).ok_or(ErrorName::Io)?;
        let ended = connection.transactions.remove(&tx);
        let ended = ended.ok_or(ErrorName::NotFound)?;
        if !commit {
            return Ok(Answer::ok());
        }
        let outcome = ended.commit(&self.tree, connection.actor, &self.limits);
        let conflict = matches!(outcome, Err(Refusal::Error(ErrorName::Again)));
        connection.conflicted = conflict && connection.actor.privileged;
        let (tree, changes) = outcome?;
        let before = std::mem::replace(&mut self.tree, tree);
        Ok(Answer::ok_then(Then::Changed(before, changes)))
    }

    /// Lets the unprivileged connections go on, if they wait for this transaction (for any one of
    /// this connection, when none is named).
    pub(super) fn leave_exclusive(&mut self, id: ConnectionId, tx: Option<u32>) {
        if let Some((holder, held)) = self.exclusive
            && holder == id
            && tx.is_none_or(|tx| tx == held)
        {
            self.exclusive = None;
        }
    }
}

/// Requests that the protocol reserves for toolstacks. This server is told of domains by its host
/// instead.
fn for_toolstacks(kind: MessageType) -> bool {
    matches!(
        kind,
        MessageType::Control
            | MessageType::Introduce
            | MessageType::Release
            | MessageType::Resume
            | MessageType::SetTarget
    )
}

fn invalid(_: PathError) -> ErrorName {
    ErrorName::Invalid
}

/// What a watch is kept under.
fn watch_place(path: WatchPath<'_>, caller: DomId) -> Result<String, ErrorName> {
    match path {
        WatchPath::Node(path) => path.to_absolute(caller).map_err(invalid),
        special => Ok(special.as_str().to_owned()),
    }
}

fn directory(node: &Node) -> Result<Vec<u8>, ErrorName> {
    let len: usize = node.names().map(|name| name.len() + 1).sum();
    if len > PAYLOAD_MAX as usize {
        return Err(ErrorName::TooBig);
    }
    let mut listing = Vec::with_capacity(len);
    for name in node.names() {
        listing.extend_from_slice(name.as_bytes());
        listing.push(0);
    }
    Ok(listing)
}

/// The change number, then as many whole names from byte `offset` of the listing on as fit. An
/// empty name marks the end of the listing.
fn directory_part(node: &Node, offset: u32) -> Result<Vec<u8>, ErrorName> {
    let mut part = format!("{}\0", node.generation()).into_bytes();
    let most = PAYLOAD_MAX as usize - 1;
    let mut skip = usize::try_from(offset).map_err(|_| ErrorName::Invalid)?;
    for name in node.names() {
        let Some(rest) = name.as_bytes().get(skip..) else {
            skip -= name.len() + 1;
            continue;
        };
        skip = 0;
        if part.len() + rest.len() + 1 > most {
            return Ok(part);
        }
        part.extend_from_slice(rest);
        part.push(0);
    }
    part.push(0);
    Ok(part)
}
