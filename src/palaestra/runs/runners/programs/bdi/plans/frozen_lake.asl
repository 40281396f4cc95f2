// Cross the ice without falling into a hole.
//
// Knowledge: an action is dangerous if it can lead into a hole; on slippery ice it can also lead to either side of where
// it points. The agent does not know the holes: it remembers each one into which it has fallen, and never again takes an
// action that can lead there. What is left to choose, the skill `ice` learns.

!live.

+!live <- while (.more_episodes) { !cross }.

+!cross <- .begin_episode; !set_mode; while (not over) { !act }; !review.

// Every third episode, and with a policy every fifth, shows what the skill can do without exploring.
+!set_mode : has_policy(ice, _) & episode(N) & N mod 5 > 0 <- .abolish(mode(_)); +mode(follow).
+!set_mode : has_policy(ice, _) <- .abolish(mode(_)); +mode(rehearse).
+!set_mode : episode(N) & N mod 3 > 0 <- .abolish(mode(_)); +mode(explore).
+!set_mode <- .abolish(mode(_)); +mode(rehearse).

@follow_policy
+!act : mode(follow) <- .policy_action(ice, A); .do(A); .learn(ice).
@rehearse
+!act : mode(rehearse) <- .best_action(ice, A); .do(A); .learn(ice).
@explore
+!act <- .rl_action(ice, A); .do(A); .learn(ice).

@remember_hole
+!review : outcome(failure) & at(X, Y) & not hole(X, Y) <- +hole(X, Y); !avoid(X, Y); !decide.
@known_hole
+!review <- !decide.

// A path that worked once works again, unless the ice is slippery: then the skill has to show that it is good enough.
// A better policy replaces the cached one, and one that fails too often is dropped. On ice that is not slippery one
// failure is enough: the lake is another one than that of the policy, so the skill explores as if it were new.
@cache_path
+!decide : not slippery & outcome(success) & not mode(follow) <- .cache_policy(ice).
@cache
+!decide : mode(rehearse) & outcome(success) & cache_threshold(T) & .confidence(ice, C) & C >= T <- .cache_policy(ice).
@drop_path
+!decide : not slippery & mode(follow) & not outcome(success) <- .drop_policy(ice); .explore_again(ice).
@drop
+!decide : has_policy(ice, _) & cache_threshold(T) & .confidence(ice, C) & C < T / 2 <- .drop_policy(ice).
@continue
+!decide <- true.

// Every neighbour of a hole forbids the actions that can lead into it.
+!avoid(X, Y) <- for (leads_to(X, Y, S, A)) { .forbid(ice, S, A) }.

leads_to(X, Y, S, A) :- move(A, DX, DY) & cell(X - DX, Y - DY, S).
leads_to(X, Y, S, A) :- slippery & move(M, DX, DY) & cell(X - DX, Y - DY, S) & beside(M, A).
beside(M, A) :- move(M, DX, DY) & move(A, DY, DX).
beside(M, A) :- move(M, DX, DY) & move(A, -DY, -DX).
cell(X, Y, S) :- size(W, H) & X >= 0 & Y >= 0 & X < W & Y < H & S = Y * W + X.
